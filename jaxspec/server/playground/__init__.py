"""The playground, a web page at /: it sends prompts and colours the tokens of the reply by how speculation made them.

Its parts are plain files beside this one. They are served as one document that loads nothing else, and whose
Content-Security-Policy lets nothing else run: the model's text can't become a program.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import Response

_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')


@dataclass(frozen=True)
class Playground:
    """The document and its HTTP headers."""

    html: bytes
    headers: Mapping[str, str]


def playground_routes() -> APIRouter:
    """GET of /. The document needs no key; the requests that it sends do, if the server has one."""
    router = APIRouter()
    page = read_playground()

    @router.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        if request.headers.get("if-none-match") == page.headers["ETag"]:
            return Response(status_code=304, headers=page.headers)
        return Response(page.html, media_type="text/html", headers=page.headers)

    return router


def read_playground() -> Playground:
    """One document: index.html with the contents of the files that it refers to."""
    html = (files("jaxspec.server.playground") / "index.html").read_text("utf-8")
    html, styles = _inline(html, "style", _STYLE)
    html, scripts = _inline(html, "script", _SCRIPT)
    document = html.encode()
    headers = {
        "Content-Security-Policy": _policy(styles, scripts),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(document).hexdigest()[:32]}"',
    }
    return Playground(document, headers)


def _inline(html: str, element: str, reference: re.Pattern[str]) -> tuple[str, list[str]]:
    """The document with the files' contents in place of the references to them, and their hashes for the policy."""
    sources = []

    def put(match: re.Match[str]) -> str:
        part = "\n" + (files("jaxspec.server.playground") / match[1]).read_text("utf-8")
        sources.append(f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'")
        return f"<{element}>{part}</{element}>"

    return reference.sub(put, html), sources


def _policy(styles: list[str], scripts: list[str]) -> str:
    """Only the document's own parts run, they talk only to this server, and no string becomes HTML (trusted types)."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(scripts)}",
            f"style-src {' '.join(styles)}",
            "connect-src 'self'",
            "img-src data:",  # the icon
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
