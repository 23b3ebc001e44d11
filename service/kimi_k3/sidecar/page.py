# SPDX-License-Identifier: Apache-2.0
"""The page at ``/``: the files of ``page/`` in one answer that needs nothing else.

The page's policy names the hash of its one style sheet and of each script, so a browser runs nothing but
them, and asks nobody but the sidecar.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

_FILES = files("kimi_k3.sidecar") / "page"
_STYLE = re.compile(r'<link rel="stylesheet" href="([a-z]+\.css)" />')
_SCRIPT = re.compile(r'<script src="([a-z]+\.js)"></script>')


def build(html: str, read: dict[str, str]) -> tuple[str, str]:
    """The whole page and its Content-Security-Policy.

    Args:
        html: the page, which names its style sheets and scripts.
        read: the text of each of them, by file name.

    Raises:
        ValueError: a text would end its own element, so that the rest of it would be read as HTML.
        KeyError: the page names a file that is not there.
    """
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def put(tag: str, name: str) -> str:
        text = read[name]
        if f"</{tag}" in text.lower() or "<!--" in text:
            raise ValueError(
                f"{name} holds </{tag} or <!--, which ends or changes its element; write it apart"
            )
        hashes[tag].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<{tag}>{text}</{tag}>"

    html = _STYLE.sub(lambda found: put("style", found[1]), html)
    html = _SCRIPT.sub(lambda found: put("script", found[1]), html)
    policy = (
        "default-src 'none'",
        f"script-src {' '.join(hashes['script'])}",
        f"style-src {' '.join(hashes['style'])}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return html, "; ".join(policy)


def _read() -> tuple[str, str]:
    texts = {entry.name: entry.read_text(encoding="utf-8") for entry in _FILES.iterdir()}
    return build(texts["index.html"], texts)


_HTML, _POLICY = _read()
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def page(_: Request) -> Response:
    """The page; the same for everybody, without a secret, so it asks for no token."""
    return Response(_HTML, media_type="text/html", headers=_HEADERS)
