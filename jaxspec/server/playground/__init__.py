"""The playground, a web page at /: a chat, which shows on demand how speculation made each answer.

Its parts are the files beside this one: styles, modules, and a library in vendor/. They are served as one document that loads
nothing else, and whose Content-Security-Policy lets nothing else run: the model's text can't become a program.
"""

import base64
import hashlib
import re
from collections.abc import Callable
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import Response

_STYLE = re.compile(r'<link rel="stylesheet" href="([\w./]+)">')
_SCRIPT = re.compile(r'<script src="([\w./]+)"></script>')
_MODULE = re.compile(r'<script type="module" src="([\w./]+)"></script>')
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async function|function|const|class) (\w+))", re.MULTILINE)


def playground_routes() -> APIRouter:
    """GET of /. The document needs no key; the requests that it sends do, if the server has one."""
    router = APIRouter()
    document, headers = read_playground()

    @router.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(document, media_type="text/html", headers=headers)

    return router


def read_playground() -> tuple[bytes, dict[str, str]]:
    """One document, index.html with the contents of the files that it refers to, and its HTTP headers."""
    html = (files("jaxspec.server.playground") / "index.html").read_text("utf-8")
    html, styles = _inline(html, "style", _STYLE)
    html, libraries = _inline(html, "script", _SCRIPT)
    html, modules = _inline(html, "script", _MODULE, as_script)
    document = html.encode()
    headers = {
        "Content-Security-Policy": _policy(styles, libraries + modules),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(document).hexdigest()[:32]}"',
    }
    return document, headers


def as_script(name: str, module: str) -> str:
    """A module as a script in the document. One document can't hold modules that import one another: a browser would fetch each by
    its URL, and few browsers can check what they get. So each module becomes a block that puts its exports into `modules`."""
    module = _IMPORT.sub(r'const \1 = modules["\2"];', module)
    exports = ", ".join(match[2] for match in _EXPORT.finditer(module))
    body = _EXPORT.sub(r"\1", module)
    return f'"use strict";\nglobalThis.modules ??= {{}};\n{{\n{body}modules["{name}"] = {{ {exports} }};\n}}\n'


def _inline(
    html: str, element: str, reference: re.Pattern[str], written: Callable[[str, str], str] = lambda name, text: text
) -> tuple[str, list[str]]:
    """The document with each reference to a file replaced by its contents, as `written` returns them, and the contents' hashes for
    the policy."""
    sources = []

    def put(match: re.Match[str]) -> str:
        part = "\n" + written(match[1], (files("jaxspec.server.playground") / match[1]).read_text("utf-8"))
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
