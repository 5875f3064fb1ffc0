"""The web page: one static file, and the headers that keep it to itself."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "page" / "index.html"


@cache
def read_page() -> bytes:
    return FILE.read_bytes()


def _hashes(tag: str) -> str:
    """The sources of a Content-Security-Policy that allow the inline elements of the page."""
    contents = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>".encode(), read_page(), re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(content).digest()) for content in contents)
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)


# Only the page's own script runs, and it talks to this server only: text of a model that reaches
# the page as HTML in spite of everything would neither run nor load anything.
POLICY = "; ".join(
    [
        "default-src 'none'",
        f"script-src {_hashes('script')}",
        f"style-src {_hashes('style')}",
        "img-src data:",  # the icon
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
