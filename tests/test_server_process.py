"""The functions of SGLang's documents, on a server that takes a moment to start."""

import sys
from pathlib import Path

import pytest

from jaxspec.server_process import DIRECTLY, answers
from jaxspec.testing import launch_server_cmd, print_highlight, terminate_process, wait_for_server

STUB = """
import argparse, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

parser = argparse.ArgumentParser()
for name in ("--host", "--model-path", "--wait", "--status"):
    parser.add_argument(name)
parser.add_argument("--port", type=int)
given = parser.parse_args()
if given.status:
    sys.exit(int(given.status))
time.sleep(float(given.wait or 0))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
        self.wfile.write(f"{sys.executable} {given.host} {given.model_path}".encode())

    def log_message(self, *_): ...


HTTPServer(("127.0.0.1", given.port), Handler).serve_forever()
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    path = tmp_path / "stub.py"
    path.write_text(STUB)
    return path


def test_a_server_is_launched_awaited_and_ended(stub: Path, capsys, monkeypatch):
    """Its command is on several lines and begins with python3, which is the Python that runs this. It is asked directly, whatever
    proxy the environment names."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    process, port = launch_server_cmd(f"\npython3 {stub} --wait 0.3 \\\n    --model-path 'a b'\n")
    try:
        wait_for_server(f"http://localhost:{port}/", timeout=60, process=process)
        with DIRECTLY.open(f"http://127.0.0.1:{port}/v1/models") as response:
            print_highlight(response.read().decode())
        assert not answers(f"http://127.0.0.1:{port}/nothing")
    finally:
        terminate_process(process)
    assert process.poll() is not None
    assert f"{sys.executable} 127.0.0.1 a b" in capsys.readouterr().out


def test_jaxspec_is_found_wherever_it_is_installed(monkeypatch, capfd, tmp_path):
    """And nothing in the current directory is run."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "argparse.py").write_text("raise SystemExit('poisoned')")
    process, _ = launch_server_cmd("jaxspec serve --no-such-option")
    assert process.wait(60) == 2 and "no-such-option" in capfd.readouterr().err


def test_a_server_that_ends_or_is_slow_is_an_error_and_no_endless_wait(stub: Path):
    process, port = launch_server_cmd(f"python3 {stub} --status 3")
    with pytest.raises(RuntimeError, match="ended with status 3"):
        wait_for_server(f"http://127.0.0.1:{port}", timeout=60, process=process)
    process, port = launch_server_cmd(f"python3 {stub} --wait 60 --host 0.0.0.0", port=port)
    with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
        wait_for_server(f"http://127.0.0.1:{port}", timeout=0.1, process=process)
    terminate_process(process)
    assert process.returncode == -15


@pytest.mark.parametrize("command", ["", "python3 -m jaxspec.serve --port 30000", "python3 -m jaxspec.serve --port=1"])
def test_the_port_is_chosen_here(command: str):
    with pytest.raises(ValueError, match="a command without --port"):
        launch_server_cmd(command)
