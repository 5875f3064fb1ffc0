"""The tokenizer in the metadata of a GGUF file gives the tokens of the original one."""

from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from overspill.core.errors import ConfigError
from overspill.models.huggingface.checks import check_tokenizer, has_tokenizer
from overspill.models.huggingface.gguf.tokenizer import make_tokenizer
from overspill.models.huggingface.tokenizer import open_tokenizer
from tests.models.huggingface.gguf.test_header import small

TEXTS = (
    "Experts that don't fit SPILL over, 12345 times.\n\n  Zwölf Bücher; ＡＢ e\u0301 日本語の文\n",
    "<|im_start|>user\nWhat's <think>this</think>?<|im_end|>\n   \tend  ",
    "'Tis he'll DON'T it's we've 3.14159 -- (see: x_1 += 2; // a/b)\r\n\r\nRésumé naïve",
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def trained(splits: Any) -> Tokenizer:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = splits
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(TEXTS * 3, trainer)
    return library


def metadata(library: Tokenizer, pre: str) -> dict[str, Any]:
    """Metadata that the converter writes for a tokenizer of byte pairs."""
    tokens = sorted(library.get_vocab(), key=library.get_vocab().__getitem__)
    merges = __import__("json").loads(library.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *SPECIAL, "<think>", "</think>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * 3 + [4] * 2,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": len(tokens) + 2,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def test_qwen(tmp_path: Path) -> None:
    """transformers has Qwen's own way to divide text."""
    from transformers.convert_slow_tokenizer import Qwen2Converter

    class Original:
        def __init__(self) -> None:
            self.add_prefix_space = False

    library = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    given = metadata(library, "qwen2")
    numbers = {token: at for at, token in enumerate(given["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in given["tokenizer.ggml.merges"]]
    converter = Qwen2Converter(Original())
    expected = PreTrainedTokenizerFast(tokenizer_object=converter.converted(numbers, merges))
    expected.add_special_tokens({"additional_special_tokens": SPECIAL})
    expected.add_tokens(["<think>", "</think>"])
    made = make_tokenizer(given)
    for text in TEXTS:
        assert made(text)["input_ids"] == expected(text)["input_ids"]
        decoded = made.decode(made(text)["input_ids"], clean_up_tokenization_spaces=False)
        assert decoded == __import__("unicodedata").normalize("NFC", text)
    assert made.eos_token == "<|im_end|>"
    assert made.decode(made(TEXTS[1])["input_ids"], skip_special_tokens=True).startswith("user\n")
    assert made.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"


@pytest.mark.parametrize("pre", ["gpt-4o", "llama-bpe", "deepseek-v3", "gpt-2", "glm4"])
def test_all_ways_to_divide_text_keep_it(pre: str) -> None:
    made = make_tokenizer(metadata(trained(pre_tokenizers.ByteLevel(add_prefix_space=False)), pre))
    for text in TEXTS:
        tokens = made(text, add_special_tokens=False)["input_ids"]
        assert made.decode(tokens, clean_up_tokenization_spaces=False) == text
    words = made.backend_tokenizer.pre_tokenizer.pre_tokenize_str("I'll pay 12345 now")
    digits = [word for word, _ in words if word.strip("Ġ").isdigit()]
    assert digits == ([["Ġ12345"]] if pre == "gpt-2" else [["123", "45"]])[0]
    assert (made("a")["input_ids"][0] == made.bos_token_id) == (pre == "llama-bpe")


def test_pieces_are_merged_by_their_scores() -> None:
    """As in SentencePiece: the pair with the highest score first, bytes for what is unknown."""
    pieces = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab"]
    scores = [-20.0, -21.0, -22.0, -23.0, -2.0, -1.0, -3.0, -5.0, -4.0]
    byte = [f"<0x{code:02X}>" for code in range(256)]
    given = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte, *pieces],
        "tokenizer.ggml.scores": [0.0] * 259 + scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    made = make_tokenizer(given)
    assert made.tokenize("abc ab") == ["▁", "abc", "▁ab"]
    assert made("é")["input_ids"] == [1, 259, 3 + 0xC3, 3 + 0xA9]
    assert made.decode(made("abc é ab")["input_ids"], skip_special_tokens=True) == "abc é ab"


def test_the_tokenizer_beside_the_file_comes_first(tmp_path: Path) -> None:
    path = small(tmp_path / "model.gguf")
    assert not has_tokenizer(path)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("strange")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ConfigError, match=r"that Overspill knows \(.*gpt2, strange\); .*its folder"
    ):
        check_tokenizer(path, "MODEL")
    library = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    PreTrainedTokenizerFast(tokenizer_object=library).save_pretrained(tmp_path)
    check_tokenizer(path, "MODEL")
    assert len(open_tokenizer(path)) == library.get_vocab_size()
