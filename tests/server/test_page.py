"""The web page without a browser: one file that loads nothing else."""

import base64
import hashlib
import re
from html.parser import HTMLParser

from overspill.server.page import page_response


def page_text() -> str:
    return bytes(page_response().body).decode()


class _Page(HTMLParser):
    """The tags of the page, and the content of its inline elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, str] = {}
        self.feed(page_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.inline.setdefault(self.tags[-1][0], data)

    def ids(self) -> list[str]:
        return [attributes["id"] or "" for _, attributes in self.tags if "id" in attributes]


def test_the_page_loads_no_other_file() -> None:
    page = _Page()
    linked = [
        value or ""
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster")
    ]
    assert all(value.startswith("data:") for value in linked)
    text = page_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\(|\bimport\b.*from", text)


def test_the_policy_allows_the_inline_script_and_style_and_nothing_else() -> None:
    page, policy = _Page(), page_response().headers["Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.inline[tag].encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert "unsafe" not in policy


def test_no_text_becomes_html_and_no_handler_is_inline() -> None:
    page = _Page()
    script = page.inline["script"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_every_id_of_the_script_and_of_labels_is_on_the_page_once() -> None:
    page = _Page()
    ids = page.ids()
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'\$\("([a-z-]+)"\)', page.inline["script"]))
    named = {
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in ("for", "aria-controls", "aria-describedby")
    }
    assert len(used) > 20
    assert used | named <= set(ids)
