"""Servers that a notebook or a test starts, asks and ends, with the functions that SGLang's documents use."""

import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

PYTHONS = ("python", "python3")
PYTHON = (sys.executable, "-P", "-m")
"""Runs a module, and nothing of the current directory, which may be a model's."""
POLL_SECONDS, ANSWER_SECONDS, END_SECONDS = 0.2, 5.0, 60.0
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without the proxy that the environment may name: no proxy can reach this machine's loopback."""
HIGHLIGHT, NORMAL = "\033[1;34m", "\033[0m"
"""Bold and blue, in terminals and in notebooks."""


def launch_server_cmd(command: str, host: str = "127.0.0.1", port: int | None = None) -> tuple[subprocess.Popen, int]:
    """Starts a server, which logs to this process's standard error; returns at once, with its process and port.

    Args:
        command: such as "jaxspec serve smollm2" or SGLang's "python3 -m MODULE ...", on one line or on several that end in a
            backslash. Python is the one that runs this.
        host: for the command's --host, unless that has one.
        port: None: a free one.

    Raises:
        ValueError: the command is empty, or names a port, which this function chooses.
    """
    words = shlex.split(command.replace("\\\n", " "))
    if not words or any(word.partition("=")[0] == "--port" for word in words):
        raise ValueError(f"expected a command without --port, which is an argument of its own; got {command[:80]!r}")
    if words[0] in PYTHONS:
        words[0] = sys.executable
    elif words[0] == "jaxspec":  # its directory need not be in PATH
        words[:1] = [*PYTHON, "jaxspec"]
    if not any(word.partition("=")[0] == "--host" for word in words):
        words += ["--host", host]
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
    return subprocess.Popen([*words, "--port", str(port)]), port


def wait_for_server(base_url: str, timeout: float | None = None, process: subprocess.Popen | None = None) -> None:
    """Waits until the server at an address such as http://localhost:30000 answers /v1/models.

    Args:
        base_url: without /v1.
        timeout: seconds. None: for ever, as a first start may compile for minutes.
        process: the server's own, if it is known: its end ends the waiting.

    Raises:
        TimeoutError: it did not answer in time.
        RuntimeError: the process has ended.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while not answers(f"{base_url.rstrip('/')}/v1/models"):
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}: its log says why")
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"no answer from {base_url} within {timeout:g} s")
        time.sleep(POLL_SECONDS)


def answers(url: str) -> bool:
    """Whether a GET has status 200, or a server is there and wants a key. Asks it directly, and waits ANSWER_SECONDS at most."""
    try:
        with DIRECTLY.open(url, timeout=ANSWER_SECONDS) as response:
            return response.status == 200
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)
    except OSError:
        return False


def terminate_process(process: subprocess.Popen) -> None:
    """Ends a server as SIGTERM does, running requests first, and after a minute by force."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def print_highlight(content: object) -> None:
    """Prints something so that it stands out."""
    print(f"{HIGHLIGHT}{content}{NORMAL}")
