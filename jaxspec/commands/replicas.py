"""`--dp-size N`: N servers on this machine behind a router, as one group of processes. The router is sglang-router or smg.

The first server compiles the programs; the others start when it is ready and find them in the cache. Then the router starts, so its
address answers when all is ready. If one can't start, or the router ends, all end. A server that dies later is started again.
SIGTERM and SIGINT end all in order: servers finish what is running, for --shutdown-timeout seconds or until a second signal. If
this process is killed, all are told to end.
"""

import ctypes
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec

from jaxspec.cli import exit_on_signals
from jaxspec.commands.serve_options import ServerArguments
from jaxspec.config import EngineConfig
from jaxspec.server.kv_events import FLAG as KV_EVENTS
from jaxspec.server.settings import ANY
from jaxspec.server_process import PYTHON, answers

ROUTERS = ("sglang_router", "smg")
"""Packages whose module `launch_router` takes SETTINGS, the best known first."""
SETTINGS = (
    *("--policy", "cache_aware"),
    *("--health-check-interval-secs", "2", "--health-failure-threshold", "2", "--health-success-threshold", "1"),
    *("--cb-timeout-duration-secs", "5", "--cb-success-threshold", "1", "--worker-startup-check-interval", "1"),
)
"""With these, a dead server gets no more requests after about 4 seconds instead of 3 minutes, and gets them again soon after it is
back. With any settings, a request whose answer has not begun is sent again, to another server."""
NO_ORIGIN = "http://jaxspec.invalid"
"""An origin that no web page has. sglang-router without origins allows all, and no server behind it sees where a request comes
from."""
LOST = (
    "behind the router, some fields of requests are lost on the way: cache_salt, structured_outputs and speculative on "
    '/v1/chat/completions, others too; /v1/messages and the chat page are missing (docs/fleet.md, "What a router drops")'
)
LOOPBACK = "127.0.0.1"
INTERVAL = 0.2
"""Seconds between two looks at the processes."""
PAUSE = 10.0
"""Seconds after a start before a server that was never ready is started again."""
PR_SET_PDEATHSIG = 1
"""Linux's prctl: the signal that a process gets when its parent dies."""

logger = logging.getLogger("jaxspec")


class GroupEnded(Exception):
    """All processes must end; the message says why."""


@dataclass
class LocalServer:
    """One server of the group."""

    command: list[str]
    url: str
    environment: Mapping[str, str]
    process: subprocess.Popen | None = None
    is_ready: bool = False
    """It has answered since its start."""
    again_at: float = 0.0
    """When it may be started again, in seconds of the monotonic clock."""

    def start(self) -> None:
        self.process, self.is_ready = start(self.command, self.environment), False
        self.again_at = time.monotonic() + PAUSE

    def wait(self) -> None:
        """Waits until it answers. Raises GroupEnded if it ends first."""
        assert self.process is not None
        while not answers(f"{self.url}/health"):
            if (status := self.process.poll()) is not None:
                raise GroupEnded(f"a server has ended with status {status} before it was ready")
            time.sleep(INTERVAL)
        self.is_ready = True

    def look_after(self) -> None:
        """Starts it again if it has ended: at once if it was ready, else after a pause."""
        assert self.process is not None
        status = self.process.poll()
        if status is None and not self.is_ready and answers(f"{self.url}/health"):
            self.is_ready = True
            logger.info("the server at %s is ready again", self.url)
        elif status is not None and (self.is_ready or time.monotonic() > self.again_at):
            logger.error("the server at %s has ended with status %d: it is started again", self.url, status)
            self.start()


def serve_replicas(arguments: ServerArguments, argv: Sequence[str]) -> int:
    """Runs the group until a signal ends it; the exit status is 0 then, and 1 if it ended by itself. Raises ValueError if no router
    is installed, or the options can't be used by several servers."""
    router = next(filter(find_spec, ROUTERS), None)
    if router is None:
        raise ValueError(f"--dp-size {arguments.dp_size} needs a router in this environment: pip install sglang-router, or smg")
    if arguments.port == 0:
        raise ValueError("--dp-size needs a --port: a router can't choose a free one")
    if arguments.kv_events.is_on:
        arguments.kv_events.check_servers(arguments.dp_size)
    chosen = {"num_pages", "mem_fraction"} & arguments.engine.keys()
    share = EngineConfig.mem_fraction / arguments.dp_size if not chosen and on_cpu() else None
    ports = free_ports(arguments.dp_size + 1)
    replicas = [
        LocalServer(
            [*PYTHON, "jaxspec.serve", *argv, *own_options(arguments, rank, port, share)],
            f"http://{LOOPBACK}:{port}",
            own_gpus(os.environ, rank, arguments.dp_size, arguments.engine.get("tp_size", EngineConfig.tp_size)),
        )
        for rank, port in enumerate(ports[1:])
    ]
    urls = [replica.url for replica in replicas]
    address = ("--host", arguments.host, "--port", str(arguments.port))
    metrics = ("--prometheus-host", LOOPBACK, "--prometheus-port", str(ports[0]))
    closed = ("--control-plane-api-keys", f"id:jaxspec:admin:{secrets.token_hex(32)}")  # else any client could add servers
    allowed = arguments.settings.allowed_origins or (NO_ORIGIN,)
    if ANY in allowed:  # sglang-router, whose default it is, ends at a *
        allowed = () if router == ROUTERS[0] else (ANY,)
    origins = ("--cors-allowed-origins", *allowed) if allowed else ()
    options = (*address, *metrics, *SETTINGS, *closed, *origins)
    command = [*PYTHON, f"{router}.launch_router", *options, "--worker-urls", *urls]
    logger.warning("%s", LOST)
    logger.info("%d servers at %s; %s will be at http://%s:%d", len(urls), ", ".join(urls), router, arguments.host, arguments.port)
    return run_group(replicas, command, arguments.settings.shutdown_timeout + 10)


def on_cpu() -> bool:
    """Whether JAX runs on a CPU here, where all servers share the memory. A child process asks, so that this one takes no GPU."""
    command = [sys.executable, "-P", "-c", "import jax; print(jax.default_backend())"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == "cpu"


def own_options(arguments: ServerArguments, rank: int, port: int, share: float | None = None) -> list[str]:
    """Options that, put last on the command line, where they win, start one server of the group. `share`: of the memory."""
    options = ["--dp-size", "1", "--host", LOOPBACK, "--port", str(port)]
    if share is not None:
        options += ["--mem-fraction-static", f"{share:g}"]
    if arguments.kv_events.is_on:
        options += [KV_EVENTS, json.dumps(asdict(arguments.kv_events.of_rank(rank)))]
    return options


def own_gpus(environment: Mapping[str, str], rank: int, servers: int, each: int = 1) -> dict[str, str]:
    """An environment in which server number `rank` sees its own GPUs only, `each` of them. Without GPUs the variable means nothing.

    In:  CUDA_VISIBLE_DEVICES=2,3,5,7, server 1 of 2, with 2 each
    Out: CUDA_VISIBLE_DEVICES=5,7

    Raises ValueError if the environment names fewer GPUs than there are servers.
    """
    given = environment.get("CUDA_VISIBLE_DEVICES", "")
    visible = given.split(",") if given else [str(number) for number in range(servers * each)]
    if len(visible) < servers * each:
        needed = f"--dp-size is {servers}" + (f" and --tp-size {each}" if each > 1 else "")
        raise ValueError(f"CUDA_VISIBLE_DEVICES={given} names {len(visible)} GPUs, but {needed}")
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(visible[rank * each : (rank + 1) * each])}


def free_ports(count: int) -> list[int]:
    """Ports on loopback that are free now. If another program takes one before its server does, that server can't start."""
    sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def run_group(replicas: Sequence[LocalServer], router_command: Sequence[str], patience: float) -> int:
    """Starts and watches servers and router. `patience`: seconds that servers get to end in order. Returns the exit status."""
    exit_on_signals()
    router: subprocess.Popen | None = None
    status = 0
    try:
        for together in (replicas[:1], replicas[1:]):
            for replica in together:
                replica.start()
            for replica in together:
                replica.wait()
        router = start(router_command, os.environ)
        while (ended := router.poll()) is None:
            for replica in replicas:
                replica.look_after()
            time.sleep(INTERVAL)
        raise GroupEnded(f"the router has ended with status {ended}")
    except GroupEnded as reason:
        logger.error("%s; the group ends", reason)
        status = 1
    except SystemExit:
        pass
    finally:
        servers = [replica.process for replica in replicas if replica.process is not None]
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, partial(_pass_on, servers))
        end_all(servers, patience)  # the router passes on the rest of their streams
        end_all([router] if router else [], 5.0)
    return status


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen:
    """A process that is told to end when this one dies, however that happens. Ctrl-C in the terminal reaches only this process: a
    second signal would cut off the new one's requests."""
    return subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent, process_group=0)


def end_all(processes: Sequence[subprocess.Popen], patience: float) -> None:
    """Ends processes in order, and kills those that are still there after `patience` seconds."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + patience
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.error("process %d does not end: it is killed", process.pid)
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    """In the new process, before its program starts."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _pass_on(servers: Sequence[subprocess.Popen], number: int, _frame: object) -> None:
    """Passes a second signal on to the servers, which then end running requests at once."""
    for server in servers:
        server.send_signal(number)
