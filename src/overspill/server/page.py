"""GET /: the web page, one file without anything from elsewhere."""

import base64
import hashlib
import re
from importlib import resources

from starlette.responses import Response

from overspill.server.errors import ApiError


def page_response() -> Response:
    file = resources.files("overspill.server") / "page" / "index.html"
    if not file.is_file():
        raise ApiError(404, "this installation has no web page", code="not_found")
    text = file.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _policy(text),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")


def _policy(text: str) -> str:
    """Allows the scripts and styles that are in the page, by their hashes, and nothing else."""
    scripts = " ".join(_hashes(text, "script")) or "'none'"
    styles = " ".join(_hashes(text, "style")) or "'none'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(text: str, tag: str) -> list[str]:
    found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text, re.DOTALL | re.IGNORECASE)
    digests = [hashlib.sha256(content.encode()).digest() for content in found]
    return [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
