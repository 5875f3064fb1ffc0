"""Conversations in the storage of the browser."""

import json
from typing import Any

from tests.server.node import run

MAKE = """
    const chatOf = (title, size = 1) => ({ ...page.newChat(), title, messages: [
        { role: "user", content: title, facts: "" },
        { role: "assistant", content: "x".repeat(size), facts: "1 token" },
    ] });
    let now = 1_000;
    Date.now = () => now++;
"""


def in_storage(code: str, most: str = "", data: Any = None) -> Any:
    return run("chats.js", f"{MAKE} const storage = new fake.Storage({most}); {code}", data)


def test_a_chat_is_read_as_it_was_kept() -> None:
    kept, read = in_storage("""
        const chats = new page.Chats(storage);
        const chat = { ...chatOf("Hello"), used: 12, model: "nano" };
        chats.save(chat);
        return [chat, new page.Chats(storage).read(chat.id)];
    """)
    assert read == kept
    assert read["messages"][1] == {"role": "assistant", "content": "x", "facts": "1 token"}


def test_the_newest_chat_is_first_and_other_values_are_left_alone() -> None:
    titles, left = in_storage("""
        storage.setItem("other", "1");
        const chats = new page.Chats(storage), first = chatOf("first"), second = chatOf("second");
        chats.save(first);
        chats.save(second);
        chats.save(first);
        const titles = chats.list().map(({ title }) => title);
        chats.remove(second.id);
        titles.push(chats.list().length);
        chats.clear();
        return [titles, [...storage.items.keys()]];
    """)
    assert titles == ["first", "second", 1]
    assert left == ["other"]


def test_the_oldest_chats_make_room() -> None:
    saved, total, large, titles = in_storage("""
        const chats = new page.Chats(storage, 5_000);
        const saved = [..."012345678"].map(number => chats.save(chatOf(`chat ${number}`, 1_000)));
        const total = [...storage.items.values()].reduce((sum, text) => sum + text.length, 0);
        const large = chats.save(chatOf("large", 6_000));
        return [saved.every(Boolean), total, large, chats.list().map(({ title }) => title)];
    """)
    assert saved
    assert 3_000 < total <= 5_000
    assert not large, "it alone has no room, and removes no other"
    assert titles == ["chat 8", "chat 7", "chat 6", "chat 5"]


def test_at_most_fifty_chats_are_kept() -> None:
    assert in_storage("""
        const chats = new page.Chats(storage);
        for (let number = 0; number < 60; number++) chats.save(chatOf(String(number)));
        return [chats.list().length, chats.list()[49].title];
    """) == [50, "10"]


def test_a_browser_with_less_room_keeps_the_newest_and_at_last_none() -> None:
    code = """
        const chats = new page.Chats(storage);
        for (const title of ["a", "b", "c", "d"]) chats.save(chatOf(title, 1_000));
        const titles = chats.list().map(({ title }) => title);
        return [titles, chats.save(chatOf("large", 4_000))];
    """
    assert in_storage(code, most="3_000") == [["d", "c"], False]


def test_what_another_tab_has_written_is_not_overwritten() -> None:
    assert in_storage("""
        const chats = new page.Chats(storage), here = chatOf("here");
        chats.save(here);
        const there = new page.Chats(storage).read(here.id);
        there.title = "there";
        new page.Chats(storage).save(there);
        chats.save(here);
        return [here.id !== there.id, chats.list().map(({ title }) => title)];
    """) == [True, ["here", "there"]]


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
DAMAGED = ["", "x", "1 {", "1 null", "1 {}"] + [
    "1 " + json.dumps({"messages": messages})
    for messages in ([], [1], [USER], [ANSWER, USER], [{**USER, "content": {}}, ANSWER])
]


def test_storage_that_is_switched_off_or_damaged_breaks_nothing() -> None:
    code = """
        const refuse = { get() { throw new Error("storage is switched off"); } };
        data.forEach((value, number) => storage.setItem("overspill.chat." + number, value));
        return [null, new Proxy({}, refuse), storage].map(each => {
            const chats = new page.Chats(each);
            return [chats.list(), chats.save(chatOf("a")), chats.read("a")];
        });
    """
    nothing, refused, damaged = in_storage(code, data=DAMAGED)
    assert nothing == refused == [[], False, None]
    assert damaged == [[], True, None]


def test_a_title_is_the_beginning_of_the_question() -> None:
    long = "return page.titleOf('  How\\n do  I ' + 'x'.repeat(200));"
    assert in_storage(long) == "How do I " + "x" * 71
