"""The playground as it is sent: one document, and headers that let nothing but its own parts run."""

import base64
import hashlib
import re
from pathlib import Path

import pytest

from jaxspec.server import playground
from jaxspec.server.playground import as_script, read_playground

FOLDER = Path(playground.__file__).parent
PARTS = sorted(path for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js"))
MODULES = [FOLDER / name for name in re.findall(r'<script type="module" src="(.*?)">', (FOLDER / "index.html").read_text())]
LIBRARIES = sorted((FOLDER / "vendor").iterdir())
HTML = read_playground()[0].decode()


def directives(policy: str) -> dict[str, str]:
    return {name: value for name, _, value in (directive.partition(" ") for directive in policy.split("; "))}


def test_it_is_served(client):
    response = client.http.get("/")
    assert (response.status_code, response.text) == (200, HTML)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["x-frame-options"] == "DENY"


def test_head_tells_the_same_without_the_document(client):
    get, head = client.http.get("/"), client.http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    changing = ("date", "x-request-id")
    of_head, of_get = ([pair for pair in each.headers.items() if pair[0] not in changing] for each in (head, get))
    assert of_head == of_get


def test_a_browser_that_has_it_does_not_get_it_again(client):
    again = client.http.get("/", headers={"if-none-match": client.http.get("/").headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.http.get("/", headers={"if-none-match": '"older"'}).text == HTML


@pytest.mark.parametrize("method", ["post", "put", "delete"])
def test_it_takes_nothing(client, method):
    assert getattr(client.http, method)("/").status_code == 405


def test_it_is_no_part_of_the_api(client):
    assert "/" not in client.http.get("/openapi.json").json()["paths"]


def test_the_policy_names_exactly_the_parts_of_the_document():
    policy = directives(read_playground()[1]["Content-Security-Policy"])
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for element in ("script", "style"):
        inline = re.findall(rf"<{element}>(.*?)</{element}>", HTML, re.DOTALL)
        hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in inline}
        assert inline and set(policy[f"{element}-src"].split()) == hashes


def test_every_part_is_in_the_document():
    assert {path.name for path in MODULES} == {path.name for path in PARTS if path.suffix == ".js"}
    assert all(as_script(path.name, path.read_text()) in HTML for path in MODULES)
    assert all(path.read_text() in HTML for path in [*PARTS, *LIBRARIES] if path.suffix == ".css" or path.match("vendor/*.js"))


def test_a_module_imports_what_those_before_it_export():
    exports: dict[str, set[str]] = {}
    for path in MODULES:
        text = path.read_text()
        for names, name in re.findall(r'^import \{ ([^}]*) \} from "\./(.*?)";$', text, re.MULTILINE):
            assert set(names.split(", ")) <= exports[name], f"{path.name} imports of {name}"
            assert all(len(re.findall(rf"\b{each}\b", text)) > 1 for each in names.split(", ")), f"{path.name} imports in vain"
        found = re.findall(r"^export (?:async function|function|const|class) (\w+)", text, re.MULTILINE)
        exports[path.name] = set(found)
        assert not re.search(r"^(import \{|export )", as_script(path.name, text), re.MULTILINE)


def test_libraries_come_with_their_licences_and_versions():
    readme = (FOLDER / "vendor" / "README.md").read_text()
    for path in LIBRARIES:
        if path.suffix == ".js":
            assert path.name in readme and path.with_name(f"{path.name.split('.')[0]}.LICENSE").exists()
            assert re.search(r" v(\d+\.\d+\.\d+) ", path.read_text()[:200])[1] in readme


def test_the_document_loads_nothing():
    outside_scripts = re.sub(r"<script>.*?</script>", "", HTML, flags=re.DOTALL)
    assert not re.search(r"<(script|img|iframe|object|embed|video|audio)\s[^>]*src|@import|url\(", outside_scripts)
    assert re.findall(r'<link\s[^>]*href="([^:"]*):?', HTML) == ["data"]  # the icon
    assert not re.search(r"\sstyle=|\son\w+=", HTML), "the policy forbids these attributes"


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.name)
def test_parts_can_be_put_in_the_document_and_make_no_html_of_text(path):
    text = path.read_text()
    if path.suffix != ".html":
        assert "</script" not in text and "</style" not in text
    assert not re.search(r"(inner|outer)HTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function", text)
    assert len(text.splitlines()) <= 400
