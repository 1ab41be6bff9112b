"""A Hugging Face Hub on this machine, for HF_ENDPOINT: what huggingface_hub asks for to list and download models."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

BRANCH = "main"


@dataclass
class Hub:
    """Repositories by name. Tests change what it does while it runs."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Contents of files by their paths."""
    url: str = ""
    gated: set[str] = field(default_factory=set)
    promised: dict[str, int] = field(default_factory=dict)
    """Sizes of files that are not as large as the Hub says."""
    break_after: int | None = None
    """The next large file is cut off after so many bytes, once."""
    served: list[tuple[str, str, int]] = field(default_factory=list)
    """Method, path and first byte of every request for a file."""

    def add(self, name: str, folder: Path) -> None:
        """Uploads a directory."""
        files = (file for file in folder.rglob("*") if file.is_file())
        self.repositories[name] = {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}

    def commit(self, name: str) -> str:
        return hashlib.sha1(name.encode()).hexdigest()


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """An empty Hub on a free port."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            if path.startswith("api/models/"):
                owner, name, *rest = path.removeprefix("api/models/").split("/")
                self.describe(f"{owner}/{name}", rest)
            else:
                owner, name, _, revision, file = path.split("/", 4)
                self.file(f"{owner}/{name}", revision, file)

        do_HEAD = do_GET

        def refused(self, name: str, revision: str) -> bool:
            """Answers as the Hub does where something is not there or not open to everybody."""
            if name not in hub.repositories:
                self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            elif name in hub.gated:
                self.answer(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to model {name} is restricted"})
            elif revision not in (BRANCH, hub.commit(name)):
                self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            else:
                return False
            return True

        def describe(self, name: str, rest: list[str]) -> None:
            if self.refused(name, rest[1] if len(rest) > 1 else BRANCH):
                return
            files = hub.repositories[name]
            sizes = {path: hub.promised.get(path, len(content)) for path, content in files.items()}
            if rest[:1] == ["tree"]:
                body: object = [
                    {"type": "file", "path": path, "size": size, "oid": tag(files[path])} for path, size in sizes.items()
                ]
            else:
                siblings = [{"rfilename": path, "size": size, "blobId": tag(files[path])} for path, size in sizes.items()]
                body = {"_id": "0" * 24, "id": name, "sha": hub.commit(name), "private": False, "siblings": siblings, "tags": []}
            self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def file(self, name: str, revision: str, path: str) -> None:
            if self.refused(name, revision):
                return
            content = hub.repositories[name].get(path)
            if content is None:
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
                return
            headers = {"X-Repo-Commit": hub.commit(name), "ETag": f'"{tag(content)}"', "Accept-Ranges": "bytes"}
            first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            hub.served.append((self.command, path, first))
            if first:
                headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self.answer(206 if first else 200, content[first:], headers)

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for header, value in headers.items():
                self.send_header(header, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.break_after is not None and len(body) > hub.break_after:
                body, hub.break_after, self.close_connection = body[: hub.break_after], None, True
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield hub
        server.shutdown()


def tag(content: bytes) -> str:
    """The ETag of a file."""
    return hashlib.sha1(content).hexdigest()
