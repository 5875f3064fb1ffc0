"""The tokenizer in the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_SPLITS = {
    "qwen2": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "glm4": _LLAMA3,
    "chatglm-bpe": _LLAMA3,
    "gpt-4o": _O200K,
    "minimax-m2": _O200K,
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
"""Regular expressions that divide text into words, by the names of llama.cpp."""
_NORMALIZED = ("qwen2", "olmo")
"""Tokenizers that bring text into the normal form NFC."""
_BEGINNING = ("llama-bpe", "llama3")
"""Tokenizers that by default begin a text with a token."""
_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "▁"


def is_known(metadata: Mapping[str, Any]) -> bool:
    """Return whether `make_tokenizer` knows this kind of tokenizer."""
    kind, words = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if not metadata.get("tokenizer.ggml.tokens"):
        return False
    return kind == "llama" or (kind == "gpt2" and words in _SPLITS)


def make_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """Make the tokenizer of transformers."""
    from transformers import PreTrainedTokenizerFast

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    tokens: list[str] = get("tokens")
    kinds = get("token_type", [1] * len(tokens))
    pieces = get("model") == "llama"
    library = _of_pieces(tokens, get) if pieces else _of_bytes(tokens, get)
    _add_tokens(library, tokens, kinds)
    special = {
        f"{name}_token": tokens[get(f"{key}_token_id")]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if 0 <= get(f"{key}_token_id", -1) < len(tokens)
    }
    begins = get("add_bos_token", pieces or get("pre") in _BEGINNING)
    if begins and "bos_token" in special:
        _begin_texts(library, special["bos_token"], get("bos_token_id"))
    return PreTrainedTokenizerFast(
        tokenizer_object=library,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _of_bytes(tokens: list[str], get: Any) -> Any:
    """Make a tokenizer of byte pairs as in GPT-2, where every character stands for a byte."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [_pair(merge) for merge in get("merges", [])]
    library = Tokenizer(
        models.BPE(_numbers(tokens), merges, ignore_merges=get("pre") in _BEGINNING)
    )
    if get("pre") in _NORMALIZED:
        library.normalizer = normalizers.NFC()
    words = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[get("pre")]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*words, to_bytes])
    library.decoder = decoders.ByteLevel()
    return library


def _of_pieces(tokens: list[str], get: Any) -> Any:
    """Make a tokenizer of byte pairs of SentencePiece, where pairs with the highest score are
    merged first."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.convert_slow_tokenizer import generate_merges

    numbers = _numbers(tokens)
    scores = dict(zip(tokens, get("scores", [0.0] * len(tokens)), strict=False))
    unknown = get("unknown_token_id", 0)
    library = Tokenizer(
        models.BPE(
            numbers,
            generate_merges(numbers, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend(_SPACE)] if get("add_space_prefix", True) else []
    library.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    library.decoder = decoders.Sequence([*steps, *strip])
    return library


def _numbers(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _pair(merge: str) -> tuple[str, str]:
    middle = merge.index(" ", 1)
    return merge[:middle], merge[middle + 1 :]


def _add_tokens(library: Any, tokens: list[str], kinds: list[int]) -> None:
    """Add tokens that are found in a text before it is divided."""
    from tokenizers import AddedToken

    def of(kind: int) -> list[Any]:
        found = [token for token, each in zip(tokens, kinds, strict=False) if each == kind]
        return [AddedToken(token, normalized=False, special=kind == _CONTROL) for token in found]

    library.add_special_tokens(of(_CONTROL))
    library.add_tokens(of(_USER_DEFINED))


def _begin_texts(library: Any, token: str, number: int) -> None:
    from tokenizers.processors import TemplateProcessing

    single = [token, "$A"]
    pair = [*single, f"{token}:1", "$B:1"]
    library.post_processor = TemplateProcessing(
        single=single, pair=pair, special_tokens=[(token, number)]
    )
