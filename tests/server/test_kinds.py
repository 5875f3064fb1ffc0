"""What the page sends to the two kinds of models, and what it reads."""

from tests.server.node import run

MESSAGES = [
    {"role": "user", "content": "one", "facts": ""},
    {"role": "assistant", "content": "1", "facts": "1 token"},
    {"role": "user", "content": "two"},
]


def test_a_conversation_is_sent_to_a_model_without_an_encoder() -> None:
    asked = run(
        "kinds.js", """return page.requestOf(false, data, "Be", { tgt_lang: "x" });""", MESSAGES
    )
    assert asked["path"] == "v1/chat/completions"
    assert asked["fields"] == {
        "messages": [
            {"role": "system", "content": "Be"},
            *({"role": each["role"], "content": each["content"]} for each in MESSAGES),
        ]
    }


def test_the_last_message_is_a_completion_with_an_encoder() -> None:
    asked, card, texts, totals = run(
        "kinds.js",
        """
        const languages = { src_lang: "", tgt_lang: "fra_Latn" };
        const usage = { prompt_tokens: 5, completion_tokens: 2 };
        return [
            page.requestOf(true, data, "Be", languages),
            [page.kindOf({ encoder_decoder: true, languages: ["a"] }), page.kindOf({})],
            [{ text: "b" }, { delta: { content: "a" } }, { delta: {} }, undefined].map(page.textOf),
            [page.totalOf(true, usage), page.totalOf(false, usage)],
        ];
        """,
        MESSAGES,
    )
    assert asked == {"path": "v1/completions", "fields": {"prompt": "two", "tgt_lang": "fra_Latn"}}
    assert card == [{"single": True, "languages": ["a"]}, {"single": False, "languages": []}]
    assert texts == ["b", "a", "", ""]
    assert totals == [0, 7]
