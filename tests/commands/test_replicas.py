"""--dp-size: a group of servers and a router, here of small programs that listen, lives and ends together."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import jax
import pytest

from jaxspec import serve
from jaxspec.commands import replicas
from jaxspec.commands.replicas import NO_ORIGIN, PYTHON, ROUTERS, SETTINGS, free_ports, own_gpus, own_options
from jaxspec.commands.serve_options import parse_arguments
from tests.server.conftest import wait_until

SECONDS = 60
"""On a busy machine."""
SERVER = """
import http.server, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(os.getpid()).encode())
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
PATIENT = SERVER.replace("sys.exit(0)", "(print('told', file=sys.stderr), signal.signal(2, lambda *_: sys.exit(0)))")
"""Ends only at a second signal, SIGINT."""
GROUP = """
import logging, os, sys
from jaxspec.commands.replicas import LocalServer, run_group
logging.basicConfig(level="INFO", format="%(message)s")
*ports, router = sys.argv[1:]
server, replica = {server!r}, {replica!r}
made = [LocalServer([sys.executable, "-c", replica, port], f"http://127.0.0.1:{{port}}", os.environ) for port in ports]
sys.exit(run_group(made, [sys.executable, "-c", server if router != "bad" else "raise SystemExit(3)", router], 20))
"""


class Group:
    """A group of two servers and a router, which are all the same program."""

    def __init__(self, folder: Path, *, router: str | None = None, ports: list[int] | None = None, replica: str = SERVER):
        self.ports = ports or free_ports(3)
        self.log = folder / "log"
        words = [str(self.ports[0]), str(self.ports[1]), router or str(self.ports[2])]
        with self.log.open("w") as sink:
            program = GROUP.format(server=SERVER, replica=replica)
            self.process = subprocess.Popen([sys.executable, "-c", program, *words], stderr=sink)

    def pid(self, place: int, other_than: int = 0) -> int:
        """The process that answers at a port, once it does."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[place]}/health", timeout=5) as response:
                    if (found := int(response.read())) != other_than:
                        return found
            except OSError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"nobody answers at port {place}: {self.log.read_text()}")

    def has_ended(self, pid: int) -> bool:
        """Waits for it."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
            time.sleep(0.02)
        return False


@pytest.fixture
def group(tmp_path):
    group = Group(tmp_path)
    yield group
    group.process.kill()
    group.process.wait()


@pytest.mark.variants
def test_a_server_that_dies_is_started_again_and_a_signal_ends_all(group: Group):
    router, dead, other = group.pid(2), group.pid(0), group.pid(1)
    os.kill(dead, signal.SIGKILL)
    reborn = group.pid(0, other_than=dead)
    assert (group.pid(1), group.pid(2)) == (other, router), "nobody else was touched"
    group.process.terminate()
    assert group.process.wait(SECONDS) == 0
    assert all(group.has_ended(pid) for pid in (reborn, other, router))
    assert f"the server at http://127.0.0.1:{group.ports[0]} has ended with status -9: it is started again" in group.log.read_text()


def test_a_second_signal_is_for_the_servers(tmp_path):
    group = Group(tmp_path, replica=PATIENT)
    group.pid(2)
    group.process.terminate()
    wait_until(lambda: group.log.read_text().count("told") == 2)
    group.process.send_signal(signal.SIGINT)
    assert group.process.wait(SECONDS) == 0 and "it is killed" not in group.log.read_text()


@pytest.mark.variants
def test_the_end_of_the_router_is_the_end_of_all(group: Group):
    router, servers = group.pid(2), (group.pid(0), group.pid(1))
    os.kill(router, signal.SIGKILL)
    assert group.process.wait(SECONDS) == 1 and all(map(group.has_ended, servers))
    assert "the router has ended with status -9; the group ends" in group.log.read_text()


def test_nobody_outlives_a_group_that_is_killed(group: Group):
    everybody = [group.pid(place) for place in (2, 0, 1)]
    assert [os.getpgid(pid) for pid in everybody] == everybody, "Ctrl-C in the terminal reaches the first process alone"
    group.process.kill()
    assert all(map(group.has_ended, everybody))


def test_a_server_that_can_not_start_ends_the_group(tmp_path):
    taken = serve.listen("127.0.0.1", 0)  # bound, and nobody answers there
    with taken:
        group = Group(tmp_path, ports=[*free_ports(1), taken.getsockname()[1], *free_ports(1)])
        first = group.pid(0)
        assert group.process.wait(SECONDS) == 1 and group.has_ended(first)
    assert "a server has ended with status 1 before it was ready; the group ends" in group.log.read_text()


def test_without_a_router_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(replicas, "find_spec", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(serve, "configure_logging", lambda _: None)
    assert serve.main(["--dp-size", "2"]) == 2
    expected = "--dp-size 2 needs a router in this environment: pip install sglang-router, or smg"
    assert capsys.readouterr().err == f"jaxspec serve: error: {expected}\n"


def test_nothing_in_the_current_directory_is_run(tmp_path: Path):
    (tmp_path / "argparse.py").write_text("raise SystemExit(9)")
    assert subprocess.run([*PYTHON, "jaxspec.serve", "--no-such-option"], cwd=tmp_path, check=False).returncode == 2


@pytest.mark.parametrize("router", ROUTERS)
def test_the_command_line_is_that_of_each_server_but_for_its_place(router, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(replicas, "find_spec", lambda name: name == router or None)
    monkeypatch.setattr(replicas, "on_cpu", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    found = []
    monkeypatch.setattr(replicas, "run_group", lambda *group: found.append(group) or 0)
    events = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
    argv = ["org/model", "--dp", "2", "--host", "0.0.0.0", "--port", "8000", "--kv-events-config", events]
    assert replicas.serve_replicas(parse_arguments(argv), argv) == 0
    [(servers, command, patience)] = found
    assert command[:4] == [*PYTHON, f"{router}.launch_router"] and patience == 40
    assert command[4:8] == ["--host", "0.0.0.0", "--port", "8000"] and all(each.command[:3] == [*PYTHON] for each in servers)
    assert command[-2:] == [server.url for server in servers] and all(word in command for word in SETTINGS)
    *who, key = command[command.index("--control-plane-api-keys") + 1].split(":")  # of the router's own endpoints
    assert who == ["id", "jaxspec", "admin"] and len(key) == 64 and caplog.text and key not in caplog.text
    assert command[command.index("--cors-allowed-origins") :][1:3] == [NO_ORIGIN, "--worker-urls"]
    assert caplog.text.count("cache_salt") == 1
    read = [parse_arguments(server.command[4:]) for server in servers]
    assert [server.url for server in servers] == [f"http://{each.host}:{each.port}" for each in read]
    assert [(each.model, each.dp_size, each.host) for each in read] == [("org/model", 1, "127.0.0.1")] * 2
    assert [each.kv_events.endpoint for each in read] == ["tcp://*:5557", "tcp://*:5558"]
    assert [server.environment["CUDA_VISIBLE_DEVICES"] for server in servers] == ["4", "7"]
    collide = ["--dp", "2", "--kv-events-config", events.replace("}", ', "replay_endpoint": "tcp://*:5558"}')]
    with pytest.raises(ValueError, match="port 5558 would be"):
        replicas.serve_replicas(parse_arguments(collide), collide)


@pytest.mark.parametrize(
    ("router", "given", "passed"),
    [
        ("smg", "http://a:3000,https://b", ["--cors-allowed-origins", "http://a:3000", "https://b"]),
        ("smg", "*", ["--cors-allowed-origins", "*"]),
        ("sglang_router", "*", []),  # its default; it ends at a *
    ],
)
def test_the_router_allows_the_pages_that_the_servers_would(router, given, passed, monkeypatch):
    found = []
    monkeypatch.setattr(replicas, "find_spec", lambda name: name == router or None)
    monkeypatch.setattr(replicas, "run_group", lambda *group: found.append(group) or 0)
    monkeypatch.setattr(replicas, "on_cpu", lambda: False)
    argv = ["--dp", "2", "--allowed-origins", given]
    assert replicas.serve_replicas(parse_arguments(argv), argv) == 0
    command = found[0][1]
    place = command.index("--control-plane-api-keys") + 2
    assert command[place : command.index("--worker-urls")] == passed


@pytest.mark.parametrize(
    ("given", "on_cpu", "share"),
    [("", True, 0.425), ("", False, None), ("--mem-fraction 0.6", True, 0.6), ("--max-total-tokens 4096", True, None)],
)
def test_on_a_cpu_the_memory_is_dealt_out(given, on_cpu, share, monkeypatch):
    found = []
    monkeypatch.setattr(replicas, "find_spec", lambda _: True)
    monkeypatch.setattr(replicas, "run_group", lambda servers, *_: found.extend(servers) or 0)
    monkeypatch.setattr(replicas, "on_cpu", lambda: on_cpu)
    argv = ["--dp", "2", *given.split()]
    assert replicas.serve_replicas(parse_arguments(argv), argv) == 0
    assert [parse_arguments(server.command[3:]).engine.get("mem_fraction") for server in found] == [share] * 2


def test_it_is_found_out_whether_there_is_only_a_cpu():
    assert replicas.on_cpu() == (jax.default_backend() == "cpu")


def test_gpus_are_dealt_out():
    assert [own_gpus({}, rank, 2)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["0", "1"]
    assert own_gpus({"CUDA_VISIBLE_DEVICES": "2,3,5,7"}, 1, 2, 2)["CUDA_VISIBLE_DEVICES"] == "5,7"
    with pytest.raises(ValueError, match="names 3 GPUs, but --dp-size is 2 and --tp-size 2"):
        own_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 0, 2, 2)
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=4 names 1 GPUs, but --dp-size is 2"):
        own_gpus({"CUDA_VISIBLE_DEVICES": "4"}, 0, 2)


def test_one_server_needs_no_group():
    assert parse_arguments([]).dp_size == 1
    assert json.loads(own_options(parse_arguments(['--kv-events-config={"enable_kv_cache_events": true}']), 3, 1)[-1])[
        "endpoint"
    ].endswith("5560")


def test_the_page_on_fleets_shows_the_settings_that_the_group_uses():
    page = (Path(__file__).parents[2] / "docs/fleet.md").read_text()
    shown = " ".join(page.replace("\\\n", " ").split())
    assert " ".join(SETTINGS) in shown and f"--cors-allowed-origins {NO_ORIGIN}" in shown
