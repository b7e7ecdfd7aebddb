"""The page at ``/``: one HTML file with everything in it, which talks to this server and to nobody else."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources
from typing import Final

INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@functools.cache
def page() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers.

    The content security policy allows its own style and script, by hash, and requests to this server. Whatever a model
    writes cannot become code, and nothing can be loaded from elsewhere.
    """
    html = resources.files("enginewire.server").joinpath("static/playground.html").read_text(encoding="utf-8")
    allowed = {f"{kind}-src": _hash(text) for kind, text in INLINE.findall(html)}
    policy = {
        "default-src": "'none'",
        **allowed,
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html.encode(), {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
