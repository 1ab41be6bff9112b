"""python -m tests.clients.failover ROUTER: what is lost when one of two servers behind a router is killed, in 200 requests.

The servers run the built-in model. Half of the requests are streamed. After a third of them the server that has got more is killed
with -9; after all of them it is started again, and requests go on until it has got one.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from jaxspec.commands.replicas import LOOPBACK, SETTINGS, free_ports
from tests.live_server import optimizing, url_in

REQUESTS, CONCURRENT, MAX_TOKENS = 200, 8, 16
KILL_AFTER = REQUESTS // 3
SECONDS = 600
"""For a router or a server to be ready, or used again."""
LITELLM = {
    "model_list": [],
    "router_settings": {"num_retries": 3, "allowed_fails": 1, "cooldown_time": 5, "retry_after": 0},
    "litellm_settings": {"request_timeout": 600},
}
"""Of litellm's config file, without the servers."""


@dataclass
class Server:
    """A server of the built-in model, at one port."""

    port: int
    folder: Path
    process: subprocess.Popen | None = None
    lives: int = 0

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        log = self.folder / f"{self.port}-{self.lives}.log"
        self.lives += 1
        command = [sys.executable, "-m", "jaxspec.serve", "--port", str(self.port), "--max-running-requests", "4"]
        with log.open("w") as sink:
            self.process = subprocess.Popen([*command, "--speculative-request-trees", "none"], stderr=sink, env=optimizing())
        url_in(log, self.process)

    def served(self) -> float:
        """Generating requests that have ended here, and that run."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line.startswith(("jaxspec:finished_requests_total{", "jaxspec:running_requests{")):
                total += float(line.rpartition(" ")[2])
        return total

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def end(self) -> None:
        self.kill()
        if self.process is not None:
            self.process.wait()


@dataclass
class Result:
    """What became of the requests."""

    router: str
    killed_had: float = 0.0
    """Its share of the requests before its end."""
    whole: int = 0
    """Requests that are not streamed."""
    whole_answered: int = 0
    streams: int = 0
    streams_finished: int = 0
    streams_open: int = 0
    """Streams in flight, anywhere, when the server was killed."""
    streams_lost_elsewhere: int = 0
    """Lost streams that were not in flight then."""
    slowest: float = 0.0
    """Seconds of the slowest request that was answered."""
    used_again_after: float = 0.0
    """Seconds from when the restarted server was ready until it got a request."""
    problems: list[str] = field(default_factory=list)


class Client:
    """Sends requests to a router, and keeps books."""

    def __init__(self, url: str, router: str):
        self._url, self._http = url, httpx.Client(timeout=120)
        self.result = Result(router)
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._were_open: set[int] = set()
        self.begun = 0

    def lose_one[S](
        self, pool: ThreadPoolExecutor, servers: Sequence[S], load: Callable[[S], float], kill: Callable[[S], None]
    ) -> S:
        """Sends all requests. After a third of them it kills the server that has got more; the streams in flight before and after
        that are those that may be lost. Returns this server."""
        before = [load(server) for server in servers]
        asked = [pool.submit(self.ask, number) for number in range(REQUESTS)]
        while self.begun < KILL_AFTER:
            time.sleep(0.01)
        had = [load(server) - count for server, count in zip(servers, before, strict=True)]
        victim = servers[had.index(max(had))]
        self.result.killed_had = round(max(had) / sum(had), 2)
        with self._lock:
            self._were_open |= self._open
        kill(victim)
        with self._lock:
            self._were_open |= self._open
            self.result.streams_open = len(self._were_open)
        for each in asked:
            each.result()
        return victim

    def go_on(self, pool: ThreadPoolExecutor, at_once: int, is_used: Callable[[], bool]) -> None:
        """Sends more, so many at once, until the new server is used."""
        began, again = time.monotonic(), Client(self._url, self.result.router)
        while not is_used():
            assert time.monotonic() < began + SECONDS, "the new server is not used"
            list(pool.map(again.ask, range(again.begun, again.begun + at_once)))
        self.result.used_again_after = round(time.monotonic() - began, 1)
        self.result.slowest = round(self.result.slowest, 1)
        self.result.problems += again.result.problems

    def ask(self, number: int) -> None:
        """One completion, of a prompt with a beginning of its own; every second one is streamed."""
        streamed = number % 2 == 1
        body = {
            "model": "jaxspec-demo",
            "prompt": f"{number * 7919 % 1000:03}\ndef f(x, y):\n    return",
            "temperature": 0,
            "stream": streamed,
        }
        with self._lock:
            self.begun += 1
            if streamed:
                self._open.add(number)
        began, problem = time.monotonic(), None
        try:
            problem = (self._stream if streamed else self._whole)(body | {"max_tokens": MAX_TOKENS, "ignore_eos": True})
        except httpx.HTTPError as error:
            problem = repr(error)
        seconds = time.monotonic() - began
        with self._lock:
            self._open.discard(number)
            self.result.streams += streamed
            self.result.whole += not streamed
            if problem is None:
                self.result.streams_finished += streamed
                self.result.whole_answered += not streamed
                self.result.slowest = max(self.result.slowest, seconds)
            else:
                self.result.streams_lost_elsewhere += streamed and number not in self._were_open
                self.result.problems.append(f"request {number}, {'streamed' if streamed else 'whole'}: {problem:.200}")

    def _whole(self, body: dict) -> str | None:
        response = self._http.post(f"{self._url}/v1/completions", json=body)
        if response.status_code != 200:
            return f"status {response.status_code}: {response.text}"
        tokens = response.json()["usage"]["completion_tokens"]
        return None if tokens == MAX_TOKENS else f"{tokens} tokens"

    def _stream(self, body: dict) -> str | None:
        with self._http.stream("POST", f"{self._url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                return f"status {response.status_code}: {response.read().decode()}"
            last = [line for line in response.iter_lines() if line][-1:]
        return None if last == ["data: [DONE]"] else f"ended with {last}"


@contextlib.contextmanager
def routing(router: str, python: Path, servers: list[Server], folder: Path) -> Iterator[str]:
    """The URL of a router over the servers, which knows both."""
    port, metrics = free_ports(2)
    url = f"http://{LOOPBACK}:{port}"
    if router == "litellm":
        name = {"model_name": "jaxspec-demo"}
        listed = [
            name
            | {"litellm_params": {"model": "text-completion-openai/jaxspec-demo", "api_base": f"{each.url}/v1", "api_key": "none"}}
            for each in servers
        ]
        (folder / "litellm.yaml").write_text(json.dumps(LITELLM | {"model_list": listed}))  # JSON is YAML
        command = [python.parent / "litellm", "--config", folder / "litellm.yaml", "--host", LOOPBACK, "--port", str(port)]
    else:
        address = ("--host", LOOPBACK, "--port", str(port), "--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics))
        command = [python, "-m", f"{router}.launch_router", *address, *SETTINGS, "--worker-urls", *(each.url for each in servers)]
    with (folder / "router.log").open("w") as sink, subprocess.Popen(command, stdout=sink, stderr=sink, env=os.environ) as process:
        try:
            deadline, client = time.monotonic() + SECONDS, Client(url, router)
            with ThreadPoolExecutor(CONCURRENT) as pool:  # one after the other would all go to one server
                while not all(each.served() for each in servers):
                    assert process.poll() is None and time.monotonic() < deadline, (folder / "router.log").read_text()[-3000:]
                    list(pool.map(client.ask, range(client.begun, client.begun + CONCURRENT)))
                    time.sleep(0.2)
            yield url
        finally:
            process.kill()


def run(router: str, python: Path, folder: Path) -> Result:
    """The whole test. `python`: of an environment where the router is installed."""
    servers = [Server(port, folder) for port in free_ports(2)]
    try:
        for server in servers:
            server.start()
        with routing(router, python, servers, folder) as url, ThreadPoolExecutor(CONCURRENT) as pool:
            client = Client(url, router)
            victim = client.lose_one(pool, servers, Server.served, Server.kill)
            victim.end()
            victim.start()
            client.go_on(pool, CONCURRENT, lambda: victim.served() > 0)
            return client.result
    finally:
        for server in servers:
            server.end()


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.clients.failover", description=__doc__)
    parser.add_argument("router", choices=("sglang_router", "smg", "litellm"))
    parser.add_argument("--python", type=Path, required=True, help="of an environment where the router is installed")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        result = run(options.router, options.python, Path(folder))
    print(json.dumps(asdict(result), indent=1))


if __name__ == "__main__":
    main()
