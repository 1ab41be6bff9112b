"""KV-cache events: tells routers, over ZeroMQ, which prefixes this server has cached. The format and the option are vLLM's.

A batch is a message of three frames: the topic, a sequence number (8 bytes, big-endian) and a payload in msgpack,

    [seconds, [event, ...], rank]

whose events are arrays, too (vllm/distributed/kv_events.py up to 0.22, and SGLang; llm-d, AIBrix and Dynamo read them):

    ["BlockStored", [hash, ...], hash of the block before the first or None, [token id, ...], tokens per block, None, "GPU", None]
    ["BlockRemoved", [hash, ...], "GPU"]
    ["AllBlocksCleared"]

A block is a page of the prefix cache (jaxspec/engine/pages.py). Its hash stands for its tokens and all before them, and is the same
in every server. A reader that has missed batches sends the first missing number to the replay socket (an empty frame and 8 bytes)
and gets all batches kept from that number on, [number, payload] each, then number -1 with an empty payload.
"""

import contextlib
import hashlib
import json
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from ipaddress import ip_address
from queue import Empty, SimpleQueue
from typing import Any

from jaxspec.checks import Check, Flag, Text, Whole
from jaxspec.engine.pages import Node, PageObserver

FLAG = "--kv-events-config"
ENDPOINT = "tcp://127.0.0.1:5557"
"""vLLM's port, on loopback: events hold token ids, so their readers see prompts."""
PUBLISHERS = ("zmq", "null")
DEVICE = "GPU"
"""vLLM's name for the memory from which the engine itself reads keys, whatever the device is."""
MOST_BLOCKS = 1000
"""The most events in one batch. Others wait for the next, so that no message grows with the cache."""
MOST_PORT = 65535
LINGER = 1000
"""Milliseconds that unsent messages get when the server ends."""
END = (-1).to_bytes(8, "big", signed=True)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KvEventsConfig:
    """vLLM's KVEventsConfig, with its names. Raises ValueError for a wrong value."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """"zmq" or "null", which publishes nothing. None: "zmq" if events are enabled."""
    endpoint: str = ENDPOINT
    """Where batches are sent. An address with * or ::, a loopback address in digits, or ipc:// is bound; any other, localhost too,
    is connected to, as in vLLM: then the reader is bound."""
    replay_endpoint: str | None = None
    """Where readers ask for batches that they have missed; it is bound. None: nowhere."""
    buffer_steps: int = 10_000
    """How many of the newest batches are kept for replay."""
    hwm: int = 100_000
    """The most batches that wait for a slow reader; it misses further ones."""
    topic: str = ""
    """The first frame. llm-d expects "kv@<pod>@<model>"."""

    def __post_init__(self) -> None:
        whole = Whole(1, 10_000_000)
        checks: dict[str, Check] = {"enable_kv_cache_events": Flag(), "buffer_steps": whole, "hwm": whole}
        for each in fields(self):
            value = vars(self)[each.name]
            if value is not None or each.default is not None:
                checks.get(each.name, Text()).clean(f"{FLAG}: {each.name}", value)
        if self.publisher not in (None, *PUBLISHERS):
            raise ValueError(f"{FLAG}: publisher must be one of {', '.join(PUBLISHERS)}, got {self.publisher!r:.80}")
        for name in ("endpoint", "replay_endpoint"):
            address = vars(self)[name]
            if address is not None and not address.startswith(("tcp://", "ipc://")):
                raise ValueError(f"{FLAG}: {name} must be tcp://ADDRESS:PORT or ipc://FILE, got {address!r:.80}")

    def of_rank(self, rank: int) -> "KvEventsConfig":
        """The config of server number `rank` on one machine: its ports are higher by `rank`, as in vLLM. Raises ValueError for
        endpoints without a port."""
        moved: dict[str, Any] = {}
        for name in ("endpoint", "replay_endpoint"):
            if (endpoint := vars(self)[name]) is not None:
                address, _, port = endpoint.rpartition(":")
                if not port.isdecimal():
                    raise ValueError(f"{FLAG}: {name} must end with a port, from which those of several servers count up")
                moved[name] = f"{address}:{int(port) + rank}"
        return replace(self, **moved)

    def check_servers(self, count: int) -> None:
        """Raises ValueError if `count` servers on one machine can't each have their own ports."""
        users: dict[int, str] = {}
        for rank, config in enumerate(map(self.of_rank, range(count))):
            for name in ("endpoint", "replay_endpoint"):
                if (endpoint := vars(config)[name]) is None:
                    continue
                user, port = f"{name} of server {rank}", int(endpoint.rpartition(":")[2])
                if port > MOST_PORT:
                    raise ValueError(f"{FLAG}: {user} would be at port {port}, and {MOST_PORT} is the last one")
                bound = name == "replay_endpoint" or is_bound(endpoint)
                if bound and users.setdefault(port, user) != user:
                    raise ValueError(f"{FLAG}: port {port} would be that of {users[port]} and of {user}: leave {count} to each")

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def of(cls, text: str) -> "KvEventsConfig":
        """The option's value, checked. Raises ValueError, naming the key.

        In:  '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
        """
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"{FLAG} must be JSON, got {text[:80]!r}") from None
        if not isinstance(given, dict):
            raise ValueError(f"{FLAG} must be a JSON object, got {text[:80]!r}")
        known = [each.name for each in fields(cls)]
        if unknown := [key for key in given if key not in known]:
            why = ": events never wait for a reader" if unknown[0] == "max_queue_size" else ""
            raise ValueError(f"{FLAG} has {unknown[0][:80]!r}, which is not supported{why}; supported: {', '.join(known)}")
        return cls(**given)


def is_bound(endpoint: str) -> bool:
    """Whether the publisher listens there, instead of connecting to a reader that does."""
    return endpoint.startswith("ipc://") or "*" in endpoint or "::" in endpoint or is_loopback(endpoint)


def is_loopback(endpoint: str) -> bool:
    """Whether only this machine can reach a tcp:// address, which is written in digits."""
    try:
        return ip_address(endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False


type Event = tuple[str, Node | None]
"""A change of the tree, by the name of its event, and the node that it is about; None: all of the tree. Other threads may read the
node's `key` and `parent`, which never change."""


def require_installed() -> None:
    """Raises ValueError that says what to install."""
    if find_spec("zmq") is None or find_spec("msgpack") is None:
        raise ValueError(f"{FLAG} needs pyzmq and msgpack, which are not installed: pip install 'jaxspec-llm[fleet]'")


def checked_config(text: str | None, *, prefix_cache: bool) -> KvEventsConfig:
    """What the option asks for; nothing if it was not given. Raises ValueError if it is wrong, or can't be done here."""
    config = KvEventsConfig() if text is None else KvEventsConfig.of(text)
    if config.is_on:
        if not prefix_cache:
            raise ValueError(f"{FLAG} tells about the prefix cache, which --disable-radix-cache turns off: leave one out")
        require_installed()
    return config


class Publisher(PageObserver):
    """Publishes what happens to the pages of one prefix cache, in threads of its own. The engine's thread only appends to a queue,
    and never waits: not for a slow reader, and not for the other threads."""

    def __init__(self, config: KvEventsConfig, page_size: int):
        """Raises ValueError if pyzmq or msgpack is missing, or an endpoint can't be used."""
        require_installed()
        import msgpack
        import zmq

        self._config, self._page_size, self._pack, self._zmq = config, page_size, msgpack.packb, zmq
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        """None is the end."""
        self._hashes: dict[Node, int] = {}
        """The hashes of the blocks that are in the tree after the events sent so far."""
        self._number, self._has_failed = 0, False
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        """Numbers and payloads, for replay."""
        self._keeping = threading.Lock()
        """Held while `_kept` changes or is copied."""
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, LINGER)
        self._threads: list[threading.Thread] = []
        try:
            self._start(zmq.PUB, config.endpoint, self._publish, is_bound(config.endpoint))
            if config.replay_endpoint is not None:
                self._start(zmq.ROUTER, config.replay_endpoint, self._replay, True)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"{FLAG}: {error}") from None
        for endpoint in filter(None, (config.endpoint, config.replay_endpoint)):
            if not endpoint.startswith("ipc://") and not is_loopback(endpoint):
                logger.warning("KV-cache events hold token ids, and they are sent to %s in the clear", endpoint)

    def _start(self, kind: int, endpoint: str, work: Callable[[Any], None], bound: bool) -> None:
        socket = self._context.socket(kind)
        socket.set_hwm(self._config.hwm)
        socket.ipv6 = "[" in endpoint or "::" in endpoint  # else ZeroMQ takes no such address
        try:
            (socket.bind if bound else socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
            socket.close()
            raise self._zmq.ZMQError(error.errno, f"can't use {endpoint} ({self._zmq.strerror(error.errno or 0)})") from None
        self._threads.append(threading.Thread(target=self._run, args=[work, socket], name="kv events", daemon=True))
        self._threads[-1].start()

    def _run(self, work: Callable[[Any], None], socket: Any) -> None:
        with socket:
            try:
                work(socket)
            except self._zmq.ContextTerminated:
                pass
            except Exception:
                logger.exception("KV-cache events are published no more; the server goes on")
                self._has_failed = True

    # The engine's thread

    def stored(self, node: Node) -> None:
        if node.salt is None:  # others must not learn of it
            self._note(("BlockStored", node))

    def removed(self, node: Node) -> None:
        if node.salt is None:
            self._note(("BlockRemoved", node))

    def cleared(self) -> None:
        self._note(("AllBlocksCleared", None))

    def _note(self, event: Event) -> None:
        if not self._has_failed:
            self._events.put(event)

    def close(self) -> None:
        """Publishes what has happened so far and ends the threads. May be called twice."""
        self._events.put(None)
        for thread in self._threads[:1]:
            thread.join()
        self._context.term()

    # The threads

    def _publish(self, socket: Any) -> None:
        topic = self._config.topic.encode()
        while (first := self._events.get()) is not None:
            batch, is_last = self._batch(first)
            number = self._number.to_bytes(8, "big")
            payload = self._pack([time.time(), batch, 0])
            with self._keeping:
                self._kept.append((number, payload))
            self._number += 1
            socket.send_multipart([topic, number, payload])
            if is_last:
                return

    def _batch(self, first: Event) -> tuple[list[list[Any]], bool]:
        """This event and those queued since, up to MOST_BLOCKS, as they are sent; and whether the end follows them."""
        batch: list[list[Any]] = []
        last: Node | None = None
        for count, event in enumerate(self._waiting(first), 1):
            if event is None:
                return batch, True
            tag, node = event
            if node is None:
                self._hashes.clear()
                batch.append([tag])
            elif tag == "BlockRemoved":
                removed = self._hashes.pop(node)
                if batch and batch[-1][0] == tag:
                    batch[-1][1].append(removed)
                else:
                    batch.append([tag, [removed], DEVICE])
            else:
                before = self._hashes.get(node.parent) if node.parent else None
                self._hashes[node] = stored = block_hash(before, node.key)
                if batch and batch[-1][0] == tag and node.parent is last:  # goes on where the event before it ends
                    batch[-1][1].append(stored)
                    batch[-1][3].extend(node.key)
                else:
                    batch.append([tag, [stored], before, list(node.key), self._page_size, None, DEVICE, None])
            last = node
            if count == MOST_BLOCKS:
                break
        return batch, False

    def _waiting(self, first: Event) -> Iterator[Event | None]:
        yield first
        with contextlib.suppress(Empty):
            while True:
                yield self._events.get_nowait()

    def _replay(self, socket: Any) -> None:
        while True:
            reader, *question = socket.recv_multipart()
            if len(question) != 2 or len(question[1]) != len(END):
                logger.warning("a wrong question to the replay socket of KV-cache events: expected an empty frame and 8 bytes")
                continue
            with self._keeping:
                kept = list(self._kept)
            for number, payload in kept:
                if number >= question[1]:  # big-endian: bytes compare as numbers do
                    socket.send_multipart([reader, b"", number, payload])
            socket.send_multipart([reader, b"", END, b""])


def block_hash(before: int | None, tokens: tuple[int, ...]) -> int:
    """64 bits for a block's tokens and, by the hash of the block `before`, all tokens in front of them."""
    digest = hashlib.blake2b(b"" if before is None else before.to_bytes(8, "big"), digest_size=8)
    digest.update(array("q", tokens).tobytes())
    return int.from_bytes(digest.digest(), "big")
