"""The web page in a real browser (Debian's chromium), with prepared answers."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from overspill.serve.llm import LLM
from tests.server.browser import Browser, find_chromium
from tests.server.mock_server import Mock, mock_server
from tests.server.running import running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed"),
]
ANSWERED = "document.querySelector('article.assistant .meta button')"
ANSWER = "article.assistant .body"


@pytest.fixture(scope="module")
def server() -> Iterator[Mock]:
    with mock_server() as mock:
        yield mock


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(shared_browser: Browser, server: Mock) -> Iterator[Browser]:
    """With the page open and nothing typed. The page may not cause any message in the console."""
    server.reset()
    shared_browser.resize(1280, 800)
    shared_browser.prefer(prefers_color_scheme="light")
    shared_browser.open(server.address)
    shared_browser.evaluate("sessionStorage.clear(); localStorage.clear()")
    shared_browser.open(server.address)
    shared_browser.wait_for("document.querySelector('#model').textContent === 'tiny'")
    shared_browser.problems.clear()
    yield shared_browser
    assert shared_browser.problems == []


def send(browser: Browser, text: str) -> None:
    browser.type(text)
    browser.press("Enter")


def test_a_message_is_sent_by_keyboard_and_its_answer_is_shown(
    browser: Browser, server: Mock
) -> None:
    browser.type("first")
    browser.press("Enter", shift=True)
    browser.type("second")
    browser.press("Enter")
    browser.wait_for(ANSWERED)
    assert browser.text(ANSWER) == "Hello"
    assert "2 tokens" in browser.text("article.assistant .meta")
    (asked,) = server.asked
    assert asked["messages"] == [{"role": "user", "content": "first\nsecond"}]
    assert asked["stream"]
    send(browser, "third")
    browser.wait_for("document.querySelectorAll('article.assistant .meta button').length === 2")
    assert [message["role"] for message in server.asked[1]["messages"]] == [
        "user",
        "assistant",
        "user",
    ]


def test_an_answer_appears_while_it_is_made_and_escape_stops_it(
    browser: Browser, server: Mock
) -> None:
    server.pieces, server.delay = ["piece "] * 500, 0.02
    send(browser, "go on")
    browser.wait_for(f"document.querySelector({json.dumps(ANSWER)})?.innerText.length > 20")
    busy = browser.evaluate("document.querySelector('article.assistant').ariaBusy")
    assert busy == "true"
    browser.press("Escape")
    browser.wait_for(ANSWERED)
    assert "stopped" in browser.text("article.assistant .meta")
    assert server.disconnected.wait(60), "the server still sends"
    assert browser.evaluate("document.activeElement.id") == "prompt"
    assert browser.text("#send") == "Send"


def test_new_conversation_leaves_the_running_answer(browser: Browser, server: Mock) -> None:
    server.pieces, server.delay = ["piece "] * 500, 0.02
    send(browser, "go on")
    browser.wait_for(f"document.querySelector({json.dumps(ANSWER)})?.innerText")
    browser.click("#new")
    assert server.disconnected.wait(60)
    server.reset()
    send(browser, "other")
    browser.wait_for(ANSWERED)
    assert server.asked[0]["messages"] == [{"role": "user", "content": "other"}]
    assert browser.evaluate("document.querySelectorAll('article').length") == 2


def test_settings_are_part_of_the_request_and_wrong_ones_are_refused(
    browser: Browser, server: Mock
) -> None:
    browser.click("#show-settings")
    for field, value in (("system", "Be brief."), ("temperature", "9"), ("max-tokens", "7")):
        browser.evaluate(f"document.getElementById('{field}').value = ''")
        browser.click(f"#{field}")
        browser.type(value)
    browser.click("#prompt")
    send(browser, "hello")
    browser.wait_for("document.querySelector('.error')")
    assert "Temperature must be a number from 0 to 2" in browser.text(".error")
    assert server.asked == []
    browser.evaluate("document.getElementById('temperature').value = '0.5'")
    browser.click("#send")  # the message is still in its field
    browser.wait_for(ANSWERED)
    (asked,) = server.asked
    assert (asked["temperature"], asked["max_tokens"]) == (0.5, 7)
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}


def test_a_full_queue_is_told_and_the_message_can_be_sent_again(
    browser: Browser, server: Mock
) -> None:
    server.refusal = (429, "64 answers wait.")
    send(browser, "hello")
    browser.wait_for("document.querySelector('.error')")
    assert browser.text(".error") == "64 answers wait. Try again in 7 s. (HTTP 429)"
    assert browser.evaluate("document.getElementById('prompt').value") == "hello"
    server.refusal = None
    browser.press("Enter")
    browser.wait_for(ANSWERED)
    assert len(server.asked[1]["messages"]) == 1
    assert browser.evaluate("document.querySelector('.error')") is None
    expect_failed_loads(browser, 429)


def test_the_page_asks_for_a_key_and_keeps_it_for_the_tab(browser: Browser, server: Mock) -> None:
    server.key = "secret"
    browser.wait_for("!document.getElementById('key-form').hidden")
    assert browser.evaluate("document.activeElement.id") == "key"
    send(browser, "wrong")
    browser.wait_for("document.querySelector('#key-hint').textContent.includes('not accept')")
    browser.evaluate("document.getElementById('key').value = ''")
    send(browser, "secret")
    browser.wait_for("document.getElementById('state').dataset.state === 'ready'")
    browser.open(server.address)
    send(browser, "hello")
    browser.wait_for(ANSWERED)
    expect_failed_loads(browser, 401)


def test_script_in_an_answer_is_shown_and_not_executed(browser: Browser, server: Mock) -> None:
    evil = "<script>window.bad=1</script><img src=x onerror='window.bad=1'>"
    server.pieces = [evil, "\n```", "html\n", evil, "\n```\n`", evil, "`"]
    send(browser, evil)
    browser.wait_for(ANSWERED)
    assert browser.evaluate("window.bad") is None
    assert browser.evaluate("document.querySelectorAll('article img, article script').length") == 0
    assert browser.text("article.user .body") == evil
    assert browser.text(f"{ANSWER} pre") == evil
    assert browser.text(f"{ANSWER} > p:last-child code") == evil


def test_markdown_is_shown_while_it_comes(browser: Browser, server: Mock) -> None:
    text = (
        "## Title\nSome **bold** `code` and [a link](https://a.b/c) [none](javascript:alert(1))\n\n"
        "1. one\n2. two\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\n```py\nx = 1\n\ny = 2\n```\n"
    )
    server.pieces, server.delay = list(text), 0.001
    send(browser, "go on")
    browser.wait_for(f"document.querySelector({json.dumps(ANSWER + ' li')})")
    assert browser.text(f"{ANSWER} h4") == "Title"
    browser.wait_for(ANSWERED)
    assert browser.text(f"{ANSWER} strong") == "bold"
    assert browser.evaluate("[...document.querySelectorAll('article a')].map(a => a.href)") == [
        "https://a.b/c"
    ]
    assert browser.text(f"{ANSWER} td:last-child") == "2"
    assert browser.text(f"{ANSWER} pre") == "x = 1\n\ny = 2"
    assert browser.text(f"{ANSWER} .code-head span") == "py"
    assert browser.evaluate("document.querySelectorAll('.tail').length") == 0, "the cursor"
    browser.click("#show-settings")
    browser.click("#plain")
    assert browser.text(ANSWER).startswith("## Title\nSome **bold**")


def test_code_is_copied_as_it_is(browser: Browser, server: Mock) -> None:
    code = "\n".join(f"  line {number}" for number in range(120))
    server.pieces = ["```\n", code, "\n```"]
    send(browser, "go on")
    browser.wait_for(ANSWERED)
    browser.evaluate("navigator.clipboard.writeText = async text => { window.copied = text; }")
    browser.evaluate(f"document.querySelector({json.dumps(ANSWER)}).scrollIntoView()")
    browser.click(f"{ANSWER} .code-head button")
    browser.wait_for("window.copied")
    assert browser.evaluate("window.copied") == code
    assert browser.text(f"{ANSWER} pre") == code, "and shown so, although it is laid out in parts"


def test_chats_survive_a_reload_and_can_be_deleted(browser: Browser, server: Mock) -> None:
    send(browser, "first question")
    browser.wait_for(ANSWERED)
    browser.click("#new")
    send(browser, "second question")
    browser.wait_for(ANSWERED)
    browser.open(server.address)
    assert browser.text("article.user .body") == "second question"
    assert browser.text(ANSWER) == "Hello"
    assert "2 tokens" in browser.text("article.assistant .meta")
    send(browser, "more")
    browser.wait_for("document.querySelectorAll('article.assistant .meta button').length === 2")
    assert len(server.asked[2]["messages"]) == 3
    assert server.asked[2]["messages"][1] == {"role": "assistant", "content": "Hello"}
    browser.click("#show-chats")
    titles = "[...document.querySelectorAll('#chat-list .chat span')].map(each => each.innerText)"
    assert browser.evaluate(titles) == ["second question", "first question"]
    browser.click("#chat-list li:last-child .chat")
    assert browser.text("article.user .body") == "first question"
    browser.click("#show-chats")
    browser.click("#chat-list li:first-child .quiet")
    assert browser.evaluate(titles) == ["first question"]
    browser.evaluate("window.confirm = () => true")
    browser.click("#delete-chats")
    assert browser.evaluate("localStorage.length") == 0
    assert browser.evaluate("document.querySelectorAll('article').length") == 0
    browser.open(server.address)
    assert browser.evaluate("document.querySelectorAll('article').length") == 0


def test_an_answer_that_was_cut_by_a_reload_is_kept(browser: Browser, server: Mock) -> None:
    server.pieces, server.delay = ["piece "] * 500, 0.02
    send(browser, "go on")
    browser.wait_for(f"document.querySelector({json.dumps(ANSWER)})?.innerText.length > 20")
    browser.open(server.address)
    assert browser.text(ANSWER).startswith("piece piece")
    assert "incomplete" in browser.text("article.assistant .meta")


def test_a_full_context_is_told_with_a_way_out(browser: Browser, server: Mock) -> None:
    server.prompt_tokens, server.finish_reason = 98, "length"
    send(browser, "long")
    browser.wait_for("document.querySelector('.notice')")
    assert "The context of 100 tokens is full, so the answer was cut." in browser.text(".notice")
    assert browser.text("#context") == "Context 100 of 100"
    assert browser.evaluate("document.getElementById('context').className") == "full"
    server.refusal, server.code = (400, "too long"), "context_length_exceeded"
    send(browser, "again")
    browser.wait_for("document.querySelector('.notice')?.innerText.includes('no longer fits')")
    server.refusal = None
    browser.click(".notice button")
    assert browser.evaluate("document.querySelectorAll('article, .notice').length") == 0
    assert browser.evaluate("document.getElementById('prompt').value") == "again"
    server.prompt_tokens, server.finish_reason = 5, "stop"
    browser.press("Enter")
    browser.wait_for(ANSWERED)
    assert server.asked[2]["messages"] == [{"role": "user", "content": "again"}]
    assert browser.text("#context") == "Context 7 of 100"
    expect_failed_loads(browser, 400)


def test_a_message_that_fits_no_conversation_is_an_error(browser: Browser, server: Mock) -> None:
    server.refusal, server.code = (400, "shorten it"), "context_length_exceeded"
    send(browser, "long")
    browser.wait_for("document.querySelector('.error')")
    assert browser.text(".error") == "shorten it (HTTP 400)"
    expect_failed_loads(browser, 400)


def test_figures_that_are_not_current_are_dimmed(browser: Browser, server: Mock) -> None:
    server.gone = True
    browser.wait_for("document.querySelector('#stats.stale')")
    assert "The server does not answer. Figures of" in browser.text("#age")
    assert (
        float(browser.evaluate("getComputedStyle(document.querySelector('aside section')).opacity"))
        < 0.6
    )
    assert browser.text("#speed") == "123", "the last ones are still there"
    server.gone = False
    browser.wait_for("!document.querySelector('#stats.stale')")
    assert browser.evaluate("document.getElementById('age').hidden")
    browser.problems.clear()  # it names the failed loads


def test_live_figures_are_drawn(browser: Browser, server: Mock) -> None:
    browser.wait_for("document.querySelectorAll('#heat div').length === 5")
    colours = browser.evaluate(
        "[...document.querySelectorAll('#heat div')].map(cell => cell.style.background)"
    )
    assert len(set(colours)) == 5
    assert "lowest 0% in layer 0" in browser.evaluate(
        "document.getElementById('heat').getAttribute('aria-label')"
    )
    assert browser.text("#speed") == "123"
    assert [line for line in browser.text("#tiers").split("\n") if line] == [
        *("GPU", "6.0 GiB of 8.0 GiB", "of it 3.0 GiB for experts"),
        *("Host memory", "12 GiB of 48 GiB"),
        *("Disk", "not used"),
    ]
    widths = "[...document.querySelectorAll('#tiers .track div')].map(each => each.style.width)"
    assert browser.evaluate(widths) == ["75%", "25%"]
    assert "16 of 64 blocks" in browser.text("#blocks")
    assert browser.evaluate(pixels("chart")) > 0


def test_missing_figures_are_named_as_not_available(browser: Browser, server: Mock) -> None:
    server.stats = {"running": 0}
    browser.wait_for("!document.getElementById('no-heat').hidden")
    assert "Not available" in browser.text("#tiers")
    assert browser.text("#speed") == "–"
    assert browser.text("#state") == "ready"


@pytest.mark.parametrize("stats", [False, True])
def test_a_phone_shows_everything_without_horizontal_scrolling(
    browser: Browser, server: Mock, stats: bool
) -> None:
    browser.resize(360, 740, 2, mobile=True)
    server.pieces = ["long" * 50, "\n```\n", "code " * 40, "\n```"]
    send(browser, "word" * 60)
    browser.wait_for(ANSWERED)
    if stats:
        browser.click("#show-stats")
    wide = """[...document.querySelectorAll('body *')].filter(node => {
        const box = node.getBoundingClientRect();
        return box.width && box.right > innerWidth + 1 && !node.closest('pre');
    }).map(node => node.outerHTML.slice(0, 80))"""
    assert browser.evaluate(wide) == []
    assert browser.evaluate("document.documentElement.scrollWidth") == 360


def test_every_control_is_reached_by_tab_and_has_a_name(browser: Browser) -> None:
    browser.click("#show-settings")
    seen: list[str] = []
    for _ in range(12):
        browser.press("Tab")
        seen.append(browser.evaluate("document.activeElement.id"))
    assert {"new", "log", "system", "temperature", "max-tokens", "prompt", "send"} <= set(seen)
    browser.call("Accessibility.enable")
    nodes: list[dict[str, Any]] = browser.call("Accessibility.getFullAXTree")["nodes"]
    controls = [
        node
        for node in nodes
        if node.get("role", {}).get("value") in ("button", "textbox", "spinbutton")
    ]
    assert len(controls) >= 7
    assert all(node["name"]["value"] for node in controls)


def test_polling_pauses_while_the_tab_is_hidden(browser: Browser) -> None:
    browser.evaluate("""
        window.asked = 0;
        const fetched = window.fetch;
        window.fetch = (...given) => { window.asked++; return fetched(...given); };
        Object.defineProperty(document, "hidden", {value: true, configurable: true});
    """)
    before = browser.evaluate("window.asked")
    browser.call(
        "Runtime.evaluate",
        expression="new Promise(done => setTimeout(done, 1500))",
        awaitPromise=True,
    )
    assert browser.evaluate("window.asked") == before
    browser.evaluate(
        "delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))"
    )
    browser.wait_for(f"window.asked > {before}")


def test_the_real_server_answers_the_page_that_was_opened_with_a_password(
    shared_browser: Browser, llm: LLM
) -> None:
    with running(llm, api_key="secret") as real:
        shared_browser.problems.clear()
        shared_browser.open(real.url.replace("//", "//user:secret@"))
        shared_browser.wait_for("document.querySelector('#state').dataset.state === 'ready'")
        shared_browser.evaluate("document.getElementById('max-tokens').value = 8")
        send(shared_browser, "hello")
        shared_browser.wait_for(ANSWERED)
        assert shared_browser.text("#context").endswith(" of 512")
        assert shared_browser.text(ANSWER)
        assert "tokens" in shared_browser.text("article.assistant .meta")
        assert "blocks" in shared_browser.text("#blocks")
        assert "no expert cache" in shared_browser.text("#no-heat")
        assert shared_browser.problems == []


def expect_failed_loads(browser: Browser, status: int) -> None:
    """The console names failed requests; nothing else may be there."""
    assert browser.problems
    assert all(f"status of {status}" in problem for problem in browser.problems)
    browser.problems.clear()


def pixels(canvas: str) -> str:
    """The number of pixels of the canvas that something was drawn on."""
    return f"""(() => {{
        const node = document.getElementById('{canvas}');
        const data = node.getContext('2d').getImageData(0, 0, node.width, node.height).data;
        return data.filter((value, index) => index % 4 === 3 && value > 0).length;
    }})()"""
