from overspill.train.finetune.alpaca import convert
from overspill.train.finetune.examples import Examples
from overspill.train.finetune.kinds import Chat, Instruction, Kind, Pair

ROWS = Examples(
    Kind.INSTRUCTION,
    [Instruction("f:1", "Add {input}.", "2, 3", "5"), Instruction("f:2", "Say hi.", "", "Hi.")],
)


def test_instructions_become_chats() -> None:
    found = convert(ROWS, to_chats=True)
    assert found.kind is Kind.CHAT
    assert found.items == [
        Chat(
            where,
            [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}],
        )
        for where, asked, answer in (
            ("f:1", "Add {input}.\n\n2, 3", "5"),
            ("f:2", "Say hi.", "Hi."),
        )
    ]


def test_instructions_become_pairs_with_the_prompt_of_alpaca() -> None:
    found = convert(ROWS, to_chats=False)
    assert found.kind is Kind.PAIR
    with_input = (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd {input}.\n\n### Input:\n2, 3\n\n### Response:\n"
    )
    without = (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nSay hi.\n\n### Response:\n"
    )
    assert found.items == [Pair("f:1", with_input, "5"), Pair("f:2", without, "Hi.")]
