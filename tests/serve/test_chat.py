"""Conversations that do not fit into the context, or whose answers are stopped."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from overspill import LLM, SamplingParams
from overspill.core.errors import EngineError
from overspill.serve.chat import Chat, QuestionTooLong
from tests.serve.test_llm import checkpoint as checkpoint  # a fixture

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, device="cpu", context=32) as made:
        yield made


def answer(chat: Chat, question: str) -> str:
    return "".join(piece.text for piece in chat.ask(question))


def test_the_oldest_turns_are_left_out_and_stay_so(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, prompts = Chat(llm, PARAMS, system="S"), []
    stream = llm.stream
    monkeypatch.setattr(
        llm, "stream", lambda prompt, params: prompts.append(prompt) or stream(prompt, params)
    )
    counts = []
    for question in "abcdefgh":
        answer(chat, question)
        counts.append(chat.left_out)
        kept = [{"role": "system", "content": "S"}, *chat.turns[chat.left_out : -1]]
        assert prompts[-1] == llm.chat_tokens(kept)
        assert chat.used_tokens == len(prompts[-1]) + 4 <= llm.context
    assert counts == sorted(counts)
    assert counts[0] == 0 < counts[-1]
    assert len(chat.turns) == 16
    before = chat.left_out
    answer(chat, "")  # so short that more would fit
    assert chat.left_out >= before
    chat.forget()
    assert (chat.turns, chat.left_out, chat.used_tokens) == ([], 0, 0)


def test_a_question_that_does_not_fit_at_all_changes_nothing(llm: LLM) -> None:
    chat = Chat(llm, PARAMS)
    answer(chat, "a")
    before = list(chat.turns)
    with pytest.raises(QuestionTooLong, match=r"has 99 tokens.* has room for 28 beside an answer"):
        answer(chat, "x" * 99)
    assert (chat.turns, chat.left_out) == (before, 0)


def test_an_answer_that_fills_the_context_is_known(llm: LLM) -> None:
    chat = Chat(llm, SamplingParams(max_tokens=99, ignore_eos=True))
    answer(chat, "a")
    assert chat.is_full
    answer(Chat(llm, PARAMS), "a")
    chat.forget()
    assert not chat.is_full


def test_a_stopped_answer_is_kept_as_far_as_it_was_given_out(llm: LLM) -> None:
    chat = Chat(llm, PARAMS)
    pieces = chat.ask("a")
    text = next(piece.text for piece in pieces if piece.text)
    pieces.close()
    assert [turn["content"] for turn in chat.turns] == ["a", text]


def test_a_question_without_an_answer_is_forgotten(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(llm, PARAMS)

    def interrupted(error: BaseException) -> None:
        def stream(prompt: list[int], params: SamplingParams) -> Iterator[object]:
            raise error
            yield

        monkeypatch.setattr(llm, "stream", stream)
        with pytest.raises(type(error)):
            answer(chat, "a")
        assert chat.turns == []

    interrupted(KeyboardInterrupt())
    interrupted(EngineError("broken"))
