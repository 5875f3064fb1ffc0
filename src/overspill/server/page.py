"""GET / and /page/...: the web page, which loads nothing from elsewhere."""

from importlib import resources
from importlib.resources.abc import Traversable

from starlette.responses import Response

from overspill.server.errors import ApiError

_TYPES = {".js": "text/javascript", ".css": "text/css"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",  # an answer of the API is no script
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_response() -> Response:
    return _respond(_folder() / "index.html", "text/html")


def part_names() -> list[str]:
    """Return the names of the scripts and styles of the page."""
    folder = _folder()
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return sorted(name for name in names if _suffix(name) in _TYPES)


def part_response(name: str) -> Response:
    """Return the script or style with a name of `part_names`."""
    return _respond(_folder() / name, _TYPES[_suffix(name)])


def _folder() -> Traversable:
    return resources.files("overspill.server") / "page"


def _suffix(name: str) -> str:
    return "." + name.rpartition(".")[2]


def _respond(file: Traversable, kind: str) -> Response:
    if not file.is_file():
        raise ApiError(404, "this installation has no web page", code="not_found")
    text = file.read_text(encoding="utf-8")
    return Response(text, headers=_HEADERS, media_type=f"{kind}; charset=utf-8")
