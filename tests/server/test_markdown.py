"""Markdown of answers, as the page's module makes it."""

import random
import re
from typing import Any

from tests.server.node import run

RENDER = """
    const render = (text, cuts) => {
        const node = document.createElement("div"), made = new page.Markdown(node);
        let from = 0;
        for (const to of [...cuts, text.length]) { made.write(text.slice(from, to)); from = to; }
        made.finish();
        return node.children.map(child => child.markup()).join("");
    };
"""


def render_all(texts: list[str]) -> list[str]:
    code = RENDER + "return data.map(text => render(text, []));"
    return [plain(each) for each in run("markdown.js", code, texts)]


def plain(markup: str) -> str:
    """Without what only the style needs."""
    markup = re.sub(r' className="(line|table|code)"| tabIndex="0"', "", markup)
    return re.sub(r"<span>(.*?)</span>", r"\1", markup, flags=re.DOTALL)


def code(text: str, language: str = "") -> str:
    head = f'<div className="code-head">{language}<button className="quiet" type="button">Copy'
    body = f'<span className="piece">{text}</span>' if text else ""
    return f"<div>{head}</button></div><pre><code>{body}</code></pre></div>"


def link(address: str, text: str) -> str:
    rest = 'target="_blank" rel="noopener noreferrer"'
    return f'<a href="{address}" title="{address}" {rest}>{text}</a>'


LISTS = (
    "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p><p>d</p></li></ul></li>"
    "<li><p>e</p></li></ul><p>f</p>"
)
NUMBERS = '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol><ul><li><p>c</p></li></ul>'
EMPHASIS = "<em>b</em> <strong>c</strong> <em><strong>d</strong></em> <em>e</em> <strong>f</strong>"
QUOTE = "<blockquote><p>a</p><ul><li><p>b</p></li></ul><p>c</p></blockquote><p>d</p>"
TABLE = (
    '<div><table><thead><tr><th className="center">a</th><th className="right">b</th></tr></thead>'
    '<tbody><tr><td className="center">1</td><td className="right">2</td></tr>'
    '<tr><td className="center"><code>x</code></td><td className="right"></td></tr>'
    "</tbody></table></div><p>end</p>"
)
SMALL_TABLE = (
    "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
    "<tbody><tr><td>|</td><td>c</td></tr></tbody></table></div>"
)
INDENTED = "x\n  y"
BARE = "https://a.b/c_(d)_e?f=1&amp;g=2"
CASES = {
    "": "",
    "one\ntwo\n\nthree": "<p>onetwo</p><p>three</p>",
    "# A #\n###### B\n#no\n# ": "<h3>A</h3><h6>B</h6><p>#no</p><h3></h3>",
    "a *b* **c** ***d*** _e_ __f__ ~~g~~": f"<p>a {EMPHASIS} <del>g</del></p>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "snake_case_name 2 * 3 * 4 ** **** a~b": "<p>snake_case_name 2 * 3 * 4 ** **** a~b</p>",
    "*a **b* c": "<p><em>a **b</em> c</p>",
    r"\*a\* \` \x": r"<p>*a* ` \x</p>",
    "`a *b*` ``c ` d`` ` e": "<p><code>a *b*</code> <code>c ` d</code> ` e</p>",
    "- a\n* b\n  - c\n\n    d\n- e\nf": LISTS,
    "3. a\n4. b\n- c": NUMBERS,
    "in\n1986. a\n-\n1. b": "<p>in1986. a-</p><ol><li><p>b</p></li></ol>",
    "1. a\n   ```py\n   x\n     y\n   ```": f"<ol><li><p>a</p>{code(INDENTED, 'py')}</li></ol>",
    "```\n**a**\n\n# b\n```\nc": code("**a**\n\n# b") + "<p>c</p>",
    "~~~~\n~~~\n```\n~~~~": code("~~~\n```"),
    "```js": code("", "js"),
    "```a`b": "<p>```a`b</p>",
    "> a\n> - b\n>\n> c\nd": QUOTE,
    "---\n***\n_ _ _\n--": "<hr></hr><hr></hr><hr></hr><p>--</p>",
    "|a|b|\n|:-:|--:|\n|1|2|3|\n| `x` |\nend": TABLE,
    "a|b\n-|-\n\\||c": SMALL_TABLE,
    "|a|b|\n|-|": "<p>|a|b||-|</p>",
    '[a *b*](https://c.d/e_f "t")': f"<p>{link('https://c.d/e_f', 'a <em>b</em>')}</p>",
    "see https://a.b/c_(d)_e?f=1&g=2).": f"<p>see {link(BARE, BARE)}).</p>",
    "<http://h.i>": f"<p>{link('http://h.i/', 'http://h.i')}</p>",
    "![alt](https://a.b/c.png)": f"<p>{link('https://a.b/c.png', 'alt')}</p>",
    "[](https://a.b/)": f"<p>{link('https://a.b/', 'https://a.b/')}</p>",
    "[[a](https://b.c)](https://d.e)": f"<p>{link('https://d.e/', '[a](https://b.c)')}</p>",
    "a\r\nb\r\n": "<p>ab</p>",
    "def f(x):\n    return  x": "<p>def f(x):    return  x</p>",
}


def test_markdown_becomes_elements() -> None:
    assert dict(zip(CASES, render_all(list(CASES)), strict=True)) == CASES


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "**<svg/onload=alert(1)>**",
    "`<b>`",
    "```<img src=x onerror=alert(1)>\n</code></pre><script>alert(1)</script>\n```",
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1))",
    "[a](java\tscript:alert(1))",
    "[a](\x01javascript:alert(1))",
    "[a](data:text/html,<script>alert(1)</script>)",
    "[a](//evil.example)",
    "[a](/stats)",
    "[a](file:///etc/passwd)",
    "[a](vbscript:x) <javascript:alert(1)>",
    "![a](javascript:alert(1)) <img/src/onerror=alert(1)>",
    '[a](https://b.c/"onmouseover="alert(1))',
    "[<img src=x onerror=alert(1)>](https://a.b)",
    'https://a.b/"onclick="alert(1) https://a.b/<script>',
    "[a](https://b.c 'x' onclick='alert(1)')",
    "| <script>alert(1)</script> | b |\n|---|---|\n| <b onclick=alert(1)> | c |",
    "[a]: javascript:alert(1)\n[a]",
    "# <script>\n> <style>\n- <iframe src=javascript:alert(1)>",
    "&lt;script&gt; &#x6a;avascript:",
    "constructor __proto__ toString [__proto__](https://a.b)",
]
WALK = """
    const found = [];
    const walk = node => {
        if (node.tag === undefined) return;
        const { tag, children, parent, ...given } = node;
        found.push([tag, given]);
        children.forEach(walk);
    };
    for (const text of data) {
        const node = document.createElement("div"), made = new page.Markdown(node);
        for (const character of text) {
            made.write(character);
            walk(node);
        }
        made.finish();
        walk(node);
        found.push(["text", node.textContent]);
    }
    return found;
"""
TAGS = {"div", "p", "span", "ul", "ol", "li", "blockquote", "hr", "pre", "code", "button", "a"}
TAGS |= {"h3", "h4", "h5", "h6", "strong", "em", "del"}
TAGS |= {"table", "thead", "tbody", "tr", "th", "td"}
ATTRIBUTES = {"className", "type", "tabIndex", "start", "href", "title", "target", "rel"}


def test_hostile_text_stays_text_at_each_moment() -> None:
    found: list[Any] = run("markdown.js", WALK, HOSTILE)
    shown = "".join(given for tag, given in found if tag == "text")
    assert shown.count("<script>alert(1)</script>") >= 4, "it is shown as it is written"
    links = []
    for tag, given in found:
        if tag == "text":
            continue
        assert tag in TAGS
        assert set(given) <= ATTRIBUTES
        if tag == "a":
            links.append(given["href"])
            assert (given["target"], given["rel"]) == ("_blank", "noopener noreferrer")
        else:
            assert not {"href", "title"} & set(given)
    assert links
    assert all(re.match(r"https?://[ab](\.[bc]?)?/", address) for address in links), links


PIECES = ["*", "**", "_", "`", "```", "~~~", "#", "## ", "- ", ">", "|", "[", "]", "(", ")", "\\"]
PIECES += ["1. ", "2)", "---", ":-:", "https://a.b", "<b>", "&", "\t", "é", "😀", "\n", "\n\n"]
PIECES += ["\n  ", "\n   ", " ", "word", "|a|b|\n|-|-|\n", "\n```py\n", "x" * 900]
"""They are put together at random."""


def test_an_answer_that_streams_ends_as_one_that_comes_at_once() -> None:
    chance = random.Random(0)
    texts = ["".join(chance.choices(PIECES, k=chance.randrange(60))) for _ in range(300)]
    texts += list(CASES)
    cuts = [sorted(chance.choices(range(len(text) + 1), k=chance.randrange(40))) for text in texts]
    compare = "return data.filter(([text, cuts]) => render(text, cuts) !== render(text, []));"
    assert run("markdown.js", RENDER + compare, list(zip(texts, cuts, strict=True))) == []


def test_no_text_is_lost() -> None:
    """But for what Markdown drops: the language of a code block after its first word, and cells
    beyond those of a table's head."""
    chance = random.Random(1)
    kept = [piece for piece in PIECES if not re.search(r"```|~~~|\|", piece)]
    words = [f"w{number}" for number in range(300)]
    texts = [
        " ".join(chance.choice(kept) + word for word in words[: chance.randrange(300)])
        for _ in range(20)
    ]
    lost = """
        return data.map(text => {
            const node = document.createElement("div"), made = new page.Markdown(node);
            made.write(text);
            made.finish();
            const found = [];
            const walk = node => {
                found.push(node.href ?? "", node.textContent);
                node.children?.forEach(walk);
            };
            walk(node);
            const all = found.join(" ");
            return text.match(/w[0-9]+/g)?.filter(word => !all.includes(word)) ?? [];
        });
    """
    assert [word for found in run("markdown.js", lost, texts) for word in found] == []


LINES = ["- an item with `code` and **bold**\n", "```\n", "word ", "a\n\n", "|a|b|\n", "    > "]
LINES += ["**a ", "[", "`", "\\", "*_", "#", "x", "https://a.b)", "\n"]


def test_the_work_of_a_write_does_not_depend_on_what_was_written_before() -> None:
    """Counted in nodes, which a busy machine does not change."""
    count = """
        const work = (line, times) => {
            const made = new page.Markdown(document.createElement("div"));
            made.write(line.repeat(times));
            const before = document.appended;
            for (let step = 0; step < 100; step++) made.write(line);
            return document.appended - before;
        };
        return data.map(line => [work(line, 100), work(line, 3_000)]);
    """
    for line, (few, many) in zip(LINES, run("markdown.js", count, LINES), strict=True):
        # a line of up to 2000 characters is formatted again with each write
        assert many <= 3 * few + 1000, line


def test_plain_text_is_shown_as_it_is() -> None:
    show = r"""
        const node = document.createElement("div"), made = new page.Plain(node);
        for (const part of ["# a *b*", "\n\n<b>", " c\n", "d"]) made.write(part);
        made.finish();
        return [node.children.map(child => child.textContent), node.markup().includes("<em>")];
    """
    assert run("markdown.js", show) == [["# a *b*", "", "<b> c", "d"], False]
