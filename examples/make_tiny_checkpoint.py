"""Makes a Mixtral small enough for any machine, to try the other examples and `overspill finetune`.

    python examples/make_tiny_checkpoint.py tiny

OUT is then an ordinary Hugging Face checkpoint with random weights: a config, weights, and a
tokenizer with one token per byte and a chat template. Two files of data lie beside them, text.jsonl
and chats.jsonl.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

TEXTS = (
    "Experts that do not fit spill over into host memory.",
    "A router sends every token to two experts.",
    "What the host cannot hold lies on the disk.",
    "Each expert moves, computes and learns on its own.",
    "Gradients leave the device as they are made.",
    "The next upload of an expert waits for its update, and for nothing else.",
    "An expert without tokens decays all the same.",
    "Training with offload gives the losses of training without.",
)

CHATS = (
    ("Experts per token?", "Two of eight."),
    ("Where do they live?", "Wherever they fit."),
    ("Is anything lost?", "No, nothing."),
    ("A full disk?", "It says so."),
    ("Who updates an expert?", "The CPU does."),
    ("When is it updated?", "After its gradient."),
    ("Is the GPU idle then?", "No, it goes on."),
    ("What if memory is short?", "Experts go to the disk."),
    ("And if there is more?", "They stay on the GPU."),
    ("May I stop a run?", "Yes, then resume it."),
    ("What is the result?", "A plain checkpoint."),
    ("Are losses the same?", "Yes, they are."),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny Mixtral checkpoint.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--experts", type=int, default=8, help="experts in each layer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer = byte_tokenizer()
    torch.manual_seed(args.seed)
    make_model(len(tokenizer), args.experts).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    write_lines(args.out / "text.jsonl", [{"text": text} for text in TEXTS])
    write_lines(args.out / "chats.jsonl", [{"messages": messages(*chat)} for chat in CHATS])
    print(f"{args.out}: a Mixtral with 2 layers of {args.experts} experts, text.jsonl, chats.jsonl")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token: pairs of bytes of which none is ever merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=128,
    )


def make_model(vocabulary: int, experts: int) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        bos_token_id=vocabulary - 3,
        eos_token_id=vocabulary - 2,
        pad_token_id=vocabulary - 1,
    )
    return MixtralForCausalLM(config)


def messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_lines(file: Path, lines: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
