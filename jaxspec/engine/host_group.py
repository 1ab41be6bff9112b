"""What the processes of one engine say to one another: rank 0 tells the others what to compile and launch.

Rank 0 has an authenticated connection to each of the others. Messages are JSON and the bytes of small arrays; nothing is pickled.
Importing this loads no JAX.
"""

import contextlib
import itertools
import logging
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any

from jaxspec.engine.connections import closed_after, connection_of, is_gone, wait_for_ever
from jaxspec.engine.hosts import Hosts, ToldToEnd, end, fail, leave
from jaxspec.engine.messages import Arrays, Header, Leaf, described, pack, unpack

RENDEZVOUS = 600.0
"""Seconds in which all processes must have found rank 0. They may start in any order."""
HANDSHAKE = 5
"""Seconds that rank 0 waits at each step of the proof that both ends know the key; for all steps together three times as long."""
LEAVING = 2.0
"""Seconds that rank 0 waits for the others when it ends in order."""
STAND_IN = 0.1
"""Seconds between two looks for messages that the thread which launches does not read."""
STOP = {"stop": True}
"""A process was told to end: rank 0 ends the group in order."""
END = pack({"end": True})
"""Rank 0 has ended in order."""

logger = logging.getLogger(__name__)


class HostGroup:
    """What an engine tells the other processes of its group. This class is for a process that runs alone, and tells nothing."""

    def pages(self, number: int, identity: str) -> None:
        """From now on programs are for this many pages. `identity`: a digest of everything else that they depend on."""

    @contextlib.contextmanager
    def compiling(self, program: Any, *, timed: bool) -> Iterator[None]:
        """While this process compiles the program, so do the others; at the end all have it. `timed`: as for compiler_options."""
        yield

    def launch(self, program: Any, leaves: Sequence[Leaf]) -> None:
        """This process is about to launch the program on these arrays."""

    def failed(self, error: Exception) -> None:
        """The engine can't go on."""


ALONE = HostGroup()


class Leader(HostGroup):
    """Rank 0's connections to the others. Any thread may use it."""

    def __init__(
        self, hosts: Hosts, key: bytes, versions: str, patience: float = RENDEZVOUS, on_stop: Callable[[], object] = lambda: None
    ):
        """Waits for the others. `versions`: of the software, which must be the same everywhere. `on_stop` is called when another
        process was told to end.

        Raises OSError if the address is unavailable, TimeoutError if they don't come in time.
        """
        self._hosts, self._on_stop = hosts, on_stop
        self._links: dict[Connection, int] = {}
        self._sending = threading.Lock()
        self._arrays, self._numbers = Arrays(), itertools.count()
        self._answers: dict[int, queue.SimpleQueue[str]] = {}
        """The answers about compilations under way, by number."""
        self._is_closing, self._all_gone = False, threading.Event()
        host, _ = hosts.address
        deadline = time.monotonic() + patience
        with socket.create_server(hosts.address, family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            while len(self._links) < hosts.nnodes - 1:
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    connected, _ = listener.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, hosts.nnodes)) - set(self._links.values()))
                    raise TimeoutError(f"no connection of rank {', '.join(map(str, missing))} within {patience:g} s") from None
                try:
                    with closed_after(connected, 3 * HANDSHAKE):
                        self._welcome(connection_of(connected, HANDSHAKE), key, versions)
                except (AuthenticationError, EOFError, OSError, ValueError, KeyError) as error:
                    logger.warning("a connection for this group was refused: %s", error or type(error).__name__)
        threading.Thread(target=self._receive, name="group", daemon=True).start()

    def _welcome(self, link: Connection, key: bytes, versions: str) -> None:
        deliver_challenge(link, key)
        answer_challenge(link, key)
        hello, _ = unpack(link.recv_bytes(2**16))
        rank, wrong = hello["rank"], ""
        for old in [each for each, other in self._links.items() if other == rank and is_gone(each)]:  # it was started again
            del self._links[old]
        if hello["nnodes"] != self._hosts.nnodes or rank not in range(1, self._hosts.nnodes):
            wrong = f"rank {rank} of {hello['nnodes']} is none of the {self._hosts.nnodes} of this group"
        elif rank in self._links.values():
            wrong = f"rank {rank} has joined already"
        elif hello["versions"] != versions:
            wrong = f"rank {rank} has {hello['versions']}, and rank 0 has {versions}"
        link.send_bytes(pack({"refused": wrong}))
        if wrong:
            raise ValueError(wrong)
        wait_for_ever(link)
        self._links[link] = rank

    def _receive(self) -> None:
        while self._links:
            for link in wait(list(self._links)):
                assert isinstance(link, Connection)
                try:
                    header, _ = unpack(link.recv_bytes())
                except (EOFError, OSError):
                    rank = self._links.pop(link)
                    if not self._is_closing:
                        end(f"{self._hosts.name(rank)} is gone")
                    continue
                if header != STOP:
                    self._answers[header["number"]].put(header["error"] and f"rank {self._links[link]}: {header['error']}")
                elif not self._is_closing:
                    self._on_stop()
        self._all_gone.set()

    def _tell(self, message: bytes) -> None:
        for link in list(self._links):
            try:
                link.send_bytes(message)
            except OSError:
                if not self._is_closing:
                    end(f"{self._hosts.name(self._links.get(link, 0))} is gone")

    def pages(self, number: int, identity: str) -> None:
        with self._sending:
            self._tell(pack({"pages": number, "identity": identity}))

    @contextlib.contextmanager
    def compiling(self, program: Any, *, timed: bool) -> Iterator[None]:
        """Raises RuntimeError if another process can't compile it."""
        number, answers = next(self._numbers), queue.SimpleQueue[str]()
        self._answers[number] = answers
        with self._sending:
            self._tell(pack({"compile": described(program), "number": number, "timed": timed}))
        yield
        errors = [answers.get() for _ in range(self._hosts.nnodes - 1)]
        del self._answers[number]
        if any(errors):
            raise RuntimeError(next(filter(None, errors)))

    def launch(self, program: Any, leaves: Sequence[Leaf]) -> None:
        with self._sending:
            self._tell(self._arrays.encode(program, leaves))

    def failed(self, error: Exception) -> None:
        fail(self._hosts, error)

    def close(self) -> None:
        """Ends the others in order, and waits until they have ended, but not long."""
        self._is_closing = True
        with self._sending:
            self._tell(END)
        self._all_gone.wait(LEAVING)


class Follower:
    """The connection of another rank to rank 0."""

    def __init__(self, hosts: Hosts, key: bytes, versions: str, patience: float = RENDEZVOUS):
        """Raises OSError if it can't join in time, AuthenticationError if rank 0 has another key, ValueError if it refuses."""
        deadline, reason = time.monotonic() + patience, ""
        while True:
            try:
                self._link = self._meet(hosts, key, versions, max(1, math.ceil(deadline - time.monotonic())))
                break
            except (OSError, EOFError) as error:  # rank 0, its name or a route may come later; what is in its place may hang up
                before, reason = reason, str(error) or "it hangs up"
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 does not answer at {hosts.dist_init_addr} after {patience:g} s: {reason}")
            if reason != before:
                logger.info("rank 0 is not yet at %s: %s", hosts.dist_init_addr, reason)
            time.sleep(0.1)
        wait_for_ever(self._link)
        self.arrays = Arrays()
        self._hosts, self._told = hosts, ToldToEnd()
        self._reading, self._received, self._to_send = threading.Lock(), queue.SimpleQueue[bytes](), queue.SimpleQueue[bytes]()
        """A signal's handler may interrupt a put, and put too: a lock would wait for itself."""
        for work in (self._stand_in, self._transmit):
            threading.Thread(target=work, name="group", daemon=True).start()

    @staticmethod
    def _meet(hosts: Hosts, key: bytes, versions: str, patience: int) -> Connection:
        """A connection to rank 0, once it lets this process in: for so many seconds a client that says nothing may keep it busy."""
        link = connection_of(socket.create_connection(hosts.address, timeout=HANDSHAKE), patience)
        answer_challenge(link, key)
        deliver_challenge(link, key)
        link.send_bytes(pack({"rank": hosts.node_rank, "nnodes": hosts.nnodes, "versions": versions}))
        if wrong := unpack(link.recv_bytes(2**16))[0]["refused"]:
            raise ValueError(wrong)
        return link

    def _transmit(self) -> None:
        with contextlib.suppress(OSError):  # rank 0 is gone: the thread that reads says so
            while True:
                self._link.send_bytes(self._to_send.get())

    def _stand_in(self) -> None:
        """Reads for the thread that launches while that one does not, as it may wait in a collective: a process that reads nothing
        for seconds counts as gone (DEAD), and the end of rank 0 would not be seen."""
        while not self._link.closed:
            time.sleep(STAND_IN)
            if self._reading.acquire(blocking=False):
                with contextlib.suppress(OSError):  # it was closed just now
                    while self._link.poll() and (message := self._read()):
                        self._received.put(message)
                self._reading.release()

    def _read(self) -> bytes:
        try:
            if (message := self._link.recv_bytes()) != END:
                return message
        except (EOFError, OSError):
            end(f"{self._hosts.name(0)} is gone")
        leave(0)

    def messages(self) -> Iterator[tuple[Header, memoryview]]:
        """What rank 0 tells, for ever, to one thread: passed on by another it takes 42 us, not 33 (AMD EPYC, 29 November 2026)."""
        while True:
            with self._reading:
                message = self._read() if self._received.empty() else self._received.get()
            yield unpack(message)

    def answer(self, number: int, error: str = "") -> None:
        """A compilation has ended. Does not wait."""
        self._to_send.put(pack({"number": number, "error": error}))

    def stop(self, number: int, _frame: object = None) -> None:
        """A signal's handler: this process was told to end, so rank 0 ends the group in order. A second ends this process alone."""
        if self._told.again(number):
            end(f"{self._hosts.name(self._hosts.node_rank)} was told twice to end")
        self._to_send.put(pack(STOP))
