"""The web page without a browser: files of the package that load nothing else."""

import posixpath
import re
from html.parser import HTMLParser

import pytest

from overspill.server.page import page_response, part_names, part_response
from tests.server.running import Running


def page_text() -> str:
    return bytes(page_response().body).decode()


def part_text(name: str) -> str:
    return bytes(part_response(name).body).decode()


def scripts() -> dict[str, str]:
    return {name: part_text(name) for name in part_names() if name.endswith(".js")}


class _Page(HTMLParser):
    """The tags of the page, and text within scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self.feed(page_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.inline.append(data)

    def ids(self) -> list[str]:
        return [attributes["id"] or "" for _, attributes in self.tags if "id" in attributes]

    def links(self) -> list[str]:
        return [
            value or ""
            for _, attributes in self.tags
            for name, value in attributes.items()
            if name in ("src", "href", "srcset", "action", "data", "poster")
        ]


def test_the_page_loads_its_own_files_and_no_other() -> None:
    links = [link for link in _Page().links() if not link.startswith("data:")]
    assert links
    loaded = {posixpath.relpath(link, "page") for link in links}
    for text in scripts().values():
        imported = re.findall(r'\bfrom\s+"([^"]*)"|\bimport\("', text)
        assert all(name.startswith("./") for name in imported)
        loaded |= {name.removeprefix("./") for name in imported}
    assert loaded == set(part_names()), "all are loaded, and there is nothing else"
    texts = page_text(), *map(part_text, part_names())
    for text in texts:
        text = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://[a-z]|@import|url\(|\bimport\(", text)


def test_the_policy_allows_files_of_the_page_and_nothing_else() -> None:
    policy = page_response().headers["Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.pop("img-src") == "data:"
    assert rules.pop("default-src") == "'none'"
    assert {rules.pop(name) for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert set(rules.values()) == {"'none'"}
    assert _Page().inline == [], "which it would not allow"


def test_no_text_becomes_html_and_no_handler_is_inline() -> None:
    for text in scripts().values():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function"
            r"|DOMParser|createContextualFragment|setHTML|srcdoc",
            text,
        )
    assert not [
        name for _, attributes in _Page().tags for name in attributes if name.startswith("on")
    ]


def test_every_id_of_the_scripts_and_of_labels_is_on_the_page_once() -> None:
    page = _Page()
    ids = page.ids()
    assert len(ids) == len(set(ids))
    used = {name for text in scripts().values() for name in re.findall(r'\$\("([a-z-]+)"\)', text)}
    named = {
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in ("for", "aria-controls", "aria-describedby", "popovertarget")
    }
    assert len(used) > 20
    assert used | named <= set(ids)


def test_what_a_module_imports_another_exports() -> None:
    exports = {
        name: set(
            re.findall(r"^export (?:async )?(?:const|class|function\*?) ([\w$]+)", text, re.M)
        )
        for name, text in scripts().items()
    }
    for name, text in scripts().items():
        for names, module in re.findall(r'import \{([^}]*)\} from "\./([^"]*)"', text):
            wanted = {each.strip() for each in names.split(",")}
            assert wanted <= exports[module], f"{name} imports {wanted - exports[module]}"


def test_the_server_sends_each_file_with_its_type(server: Running) -> None:
    for name in part_names():
        answer = server.http.get(f"/page/{name}")
        assert answer.status_code == 200
        kind = "text/javascript" if name.endswith(".js") else "text/css"
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.text == part_text(name)


@pytest.mark.parametrize("name", ["", "index.html", "main.js/", "../page.py", "..%2fpage.py", "x"])
def test_the_server_sends_no_other_file(server: Running, name: str) -> None:
    assert server.http.get(f"/page/{name}").status_code == 404
