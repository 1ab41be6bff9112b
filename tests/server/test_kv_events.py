"""KV-cache events: a reader knows the prefix tree, whatever it has missed, and the engine's thread never waits for it."""

import contextlib
import random
import threading
from collections.abc import Iterator
from socket import has_dualstack_ipv6
from types import SimpleNamespace

import msgpack
import pytest
import zmq

from jaxspec import serve
from jaxspec.commands.replicas import LOOPBACK, free_ports
from jaxspec.commands.serve_options import parse_arguments
from jaxspec.engine.pages import HeldPages, Node, PageAllocator, PrefixCache
from jaxspec.server import kv_events
from jaxspec.server.kv_events import ENDPOINT, KvEventsConfig, Publisher, block_hash, is_bound

PAGE_SIZE = 4
TIMEOUT = 20_000
"""Milliseconds."""


def free_endpoint() -> str:
    return f"tcp://{LOOPBACK}:{free_ports(1)[0]}"


@contextlib.contextmanager
def publishing(**options) -> Iterator[tuple[Publisher, PrefixCache]]:
    config = KvEventsConfig(True, endpoint=free_endpoint(), replay_endpoint=free_endpoint(), **options)
    cache = PrefixCache(PageAllocator(64, PAGE_SIZE))
    with contextlib.closing(Publisher(config, PAGE_SIZE)) as publisher:
        cache.observer = publisher
        yield publisher, cache


class Reader:
    """What a router does: it follows the batches, in the order of their numbers, and asks for those that it has missed."""

    def __init__(self, config: KvEventsConfig):
        self._context = zmq.Context()
        self.socket, self._replay = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self.socket.set_hwm(0)
        self.socket.subscribe(config.topic.encode())
        for socket, endpoint in ((self.socket, config.endpoint), (self._replay, config.replay_endpoint)):
            socket.rcvtimeo = TIMEOUT
            socket.connect(endpoint)
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """By hash: the hash of the block before it, and its tokens."""
        self.next_number, self.stored, self.removed, self.gone, self.replayed = 0, 0, 0, 0, 0

    def follow(self, until: int, lost: range = range(0)) -> None:
        """Reads until the batch before number `until` is known. Of those that are `lost` it reads nothing."""
        while self.next_number < until:
            _, number, payload = self.socket.recv_multipart()
            if int.from_bytes(number, "big") in lost:
                continue
            if int.from_bytes(number, "big") > self.next_number:
                self.ask()
            else:
                self.learn(number, payload)

    def ask(self) -> None:
        """Learns what it has missed."""
        for number, payload in self.answer(self.next_number):
            self.replayed += 1
            self.learn(number, payload)

    def answer(self, first: int) -> list[tuple[bytes, bytes]]:
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while (message := self._replay.recv_multipart())[2]:
            assert message[0] == b""
            found.append((message[1], message[2]))
        assert message == [b"", (-1).to_bytes(8, "big", signed=True), b""]
        return found

    def learn(self, number: bytes, payload: bytes) -> None:
        if int.from_bytes(number, "big") != self.next_number:
            return  # known from a replay
        self.next_number += 1
        seconds, events, rank = msgpack.unpackb(payload)
        assert seconds > 1.7e9 and rank == 0 and events
        for tag, *values in events:
            if tag == "BlockStored":
                hashes, before, tokens, size, lora_id, medium, lora_name = values
                assert (size, lora_id, medium, lora_name) == (PAGE_SIZE, None, "GPU", None) and len(tokens) == size * len(hashes)
                assert before is None or before in self.blocks
                for index, each in enumerate(hashes):
                    assert each not in self.blocks
                    self.blocks[each] = before, tuple(tokens[index * size : (index + 1) * size])
                    before = each
                self.stored += len(hashes)
            elif tag == "BlockRemoved":
                hashes, medium = values
                assert medium == "GPU"
                for each in hashes:
                    del self.blocks[each]
                self.removed += len(hashes)
            else:
                assert (tag, values) == ("AllBlocksCleared", [])
                self.gone += len(self.blocks)
                self.blocks.clear()

    def prefixes(self) -> set[tuple[int, ...]]:
        """The tree: all tokens up to the end of each block."""

        def up_to(block: int) -> tuple[int, ...]:
            before, tokens = self.blocks[block]
            return (() if before is None else up_to(before)) + tokens

        return {up_to(block) for block in self.blocks}

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextlib.contextmanager
def reading(publisher: Publisher, cache: PrefixCache | None = None) -> Iterator[Reader]:
    """With a cache, to which it says something until it is heard: the reader has subscribed."""
    with contextlib.closing(Reader(publisher._config)) as reader:
        while cache is not None and not reader.socket.poll(10):
            cache.flush()
        yield reader


def prefixes_of(node: Node, before: tuple[int, ...] = ()) -> set[tuple[int, ...]]:
    """All that a cache has below a node."""
    here = before + node.key
    return ({here} if node.key else set()).union(*(prefixes_of(child, here) for child in node.children.values()))


class Life:
    """Random requests that share prefixes, some under a salt, in a cache too small for all, and, rarely, a flush."""

    def __init__(self, cache: PrefixCache, seed: int):
        self.cache, self.random, self.held = cache, random.Random(seed), []
        self.events = 0
        note = cache.observer._note

        def counted(event):
            self.events += 1
            note(event)

        cache.observer._note = counted

    def step(self) -> None:
        draw = self.random.random()
        if draw < 0.002:
            self.cache.flush()
        elif draw < 0.5 and self.held:
            self.cache.release(self.held.pop(self.random.randrange(len(self.held))))
        else:
            tokens = [self.random.choice((1, 1, 1, 2, 70_000)) for _ in range(self.random.randrange(1, 24))]
            held: HeldPages = self.cache.match(tokens, self.random.choice((None, None, None, "salt")))
            if self.cache.grow(held, len(tokens)):
                self.cache.publish(held, tokens, len(tokens))
            self.held.append(held)


def end(publisher: Publisher) -> None:
    """Waits until all is published."""
    publisher._events.put(None)
    publisher._threads[0].join()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_reader_rebuilds_the_tree_from_ten_thousand_events_and_a_replay(seed):
    with publishing(topic="kv@pod@model") as (publisher, cache), reading(publisher, cache) as reader:
        life = Life(cache, seed)
        while life.events < 7000:
            life.step()
        reader.follow(6, lost=range(3, 5))
        assert reader.replayed > 2
        while life.events < 10_000:
            life.step()
        end(publisher)
        reader.follow(publisher._number)
        expected = prefixes_of(cache._roots[None])
        assert prefixes_of(cache._roots["salt"])
        assert reader.prefixes() == expected and len(expected) > 5
        assert reader.stored - reader.removed - reader.gone == len(expected) == len(reader.blocks)
        assert reader.removed > 1000 and reader.gone > 0


def test_a_block_is_named_alike_by_every_server_and_after_its_whole_prefix():
    first = block_hash(None, (1, 2))
    assert first == block_hash(None, (1, 2)) == 0 + first and 0 <= first < 2**64
    assert len({first, block_hash(None, (2, 1)), block_hash(first, (1, 2)), block_hash(block_hash(None, (3, 4)), (1, 2))}) == 4


def test_blocks_that_follow_one_another_are_one_event():
    with publishing() as (publisher, cache), reading(publisher) as reader:
        publisher._keeping.acquire()  # the thread stops after the first batch, so that the others wait together
        held = cache.match([])
        assert cache.grow(held, 20)
        cache.publish(held, list(range(20)), 20)
        cache.flush()
        publisher._keeping.release()
        end(publisher)
        events = [event for _, payload in reader.answer(0) for event in msgpack.unpackb(payload)[1]]
        assert [event[0] for event in events] == ["BlockStored"] * (len(events) - 1) + ["AllBlocksCleared"]
        assert len(events) <= 3 and [token for event in events[:-1] for token in event[3]] == list(range(20))


def test_the_engine_waits_for_nobody():
    """Neither for readers, of which there are none that read, nor for the thread, which is stopped here."""
    with publishing(hwm=1) as (publisher, cache), reading(publisher), publisher._keeping:
        life = Life(cache, 2)
        while life.events < 10_000:
            life.step()
        assert publisher._events.qsize() > 8000


def test_only_the_newest_batches_are_kept_for_replay():
    with publishing(buffer_steps=3) as (publisher, cache), reading(publisher) as reader:
        for _ in range(10):
            before = publisher._number
            cache.flush()
            while publisher._number == before:
                threading.Event().wait(0.001)
        assert [int.from_bytes(number, "big") for number, _ in reader.answer(0)] == [7, 8, 9]
        reader._replay.send_multipart([b"", b"what?"])  # is not answered, and disturbs nobody
        assert [int.from_bytes(number, "big") for number, _ in reader.answer(9)] == [9]


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        (ENDPOINT, True), ("tcp://[::1]:5557", True), ("tcp://*:5557", True), ("tcp://[::]:5557", True), ("ipc://events", True),
        ("tcp://localhost:5557", False), ("tcp://10.0.0.1:5557", False), ("tcp://router:5557", False),
    ],
)  # fmt: skip
def test_the_publisher_listens_on_loopback_and_where_it_is_told_to(endpoint, bound):
    assert is_bound(endpoint) == bound


def test_events_stay_on_this_machine_unless_told_otherwise(caplog):
    """They hold token ids (SECURITY.md)."""
    assert KvEventsConfig.of('{"enable_kv_cache_events": true}').endpoint == ENDPOINT == "tcp://127.0.0.1:5557"
    assert KvEventsConfig().replay_endpoint is None and not parse_arguments([]).kv_events.is_on
    with publishing():
        assert not caplog.records
    port = free_endpoint().rpartition(":")[2]
    Publisher(KvEventsConfig(True, endpoint=f"tcp://*:{port}"), 16).close()
    assert f"KV-cache events hold token ids, and they are sent to tcp://*:{port} in the clear" in caplog.text


@pytest.mark.skipif(not has_dualstack_ipv6(), reason="without IPv6")
@pytest.mark.parametrize("host", ["[::1]", "[::]"])
def test_an_address_may_be_one_of_ipv6(host):
    Publisher(KvEventsConfig(True, endpoint=f"tcp://{host}:{free_ports(1)[0]}"), 16).close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"), ("[]", "must be a JSON object"),
        ('{"max_queue_size": 5}', "'max_queue_size', which is not supported"),
        ('{"endpoint": 5}', "endpoint must be a string"), ('{"endpoint": "inproc://x"}', "endpoint must be tcp://ADDRESS:PORT"),
        ('{"publisher": "kafka"}', "publisher must be one of zmq, null"), ('{"buffer_steps": 0}', "buffer_steps must be a whole"),
        ('{"enable_kv_cache_events": "yes"}', "enable_kv_cache_events must be true or false"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(text, message, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--kv-events-config", text])
    error = capsys.readouterr().err
    assert error.startswith("jaxspec serve: error: --kv-events-config") and message in error and error.count("\n") == 1


def test_the_option_needs_the_prefix_cache_and_the_extra(monkeypatch, capsys):
    flag = '--kv-events-config={"enable_kv_cache_events": true}'
    with pytest.raises(SystemExit):
        parse_arguments([flag, "--disable-radix-cache"])
    assert "leave one out" in capsys.readouterr().err
    monkeypatch.setattr(kv_events, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse_arguments([flag])
    assert "pip install 'jaxspec-llm[fleet]'" in capsys.readouterr().err
    assert parse_arguments([]).kv_events == KvEventsConfig()  # without the option nothing is needed


def test_a_config_file_holds_a_mapping(tmp_path):
    written = "kv-events-config:\n  enable_kv_cache_events: true\n  buffer_steps: 7\n  topic: kv\n"
    (file := tmp_path / "server.yaml").write_text(written)
    assert parse_arguments(["--config", str(file)]).kv_events == KvEventsConfig(True, buffer_steps=7, topic="kv")


def test_an_address_in_use_ends_the_start_at_once(monkeypatch, capsys):
    with publishing() as (publisher, _):
        monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
        monkeypatch.setattr(serve, "configure_logging", lambda _: None)
        endpoint = publisher._config.endpoint
        config = f'{{"enable_kv_cache_events": true, "endpoint": "{endpoint}"}}'
        assert serve.main(["--port", "0", "--kv-events-config", config]) == 2
    assert f"can't use {endpoint} (Address already in use)" in capsys.readouterr().err


def test_servers_of_one_machine_count_their_ports_up():
    config = KvEventsConfig(True, endpoint="tcp://*:5557", replay_endpoint="tcp://127.0.0.1:6000")
    assert config.of_rank(0) == config
    assert config.of_rank(2) == KvEventsConfig(True, endpoint="tcp://*:5559", replay_endpoint="tcp://127.0.0.1:6002")
    with pytest.raises(ValueError, match="must end with a port"):
        KvEventsConfig(True, endpoint="ipc:///tmp/events").of_rank(1)


@pytest.mark.parametrize(
    ("endpoint", "replay", "message"),
    [
        ("tcp://*:5557", "tcp://127.0.0.1:5558", "port 5558 would be that of replay_endpoint of server 0 and of endpoint"),
        ("tcp://*:5557", "tcp://*:5559", None), ("tcp://router:5557", "tcp://*:5558", None), ("tcp://*:65534", None, None),
        ("tcp://*:65535", None, "endpoint of server 1 would be at port 65536"), ("ipc://x", None, "must end with a port"),
    ],
)  # fmt: skip
def test_servers_of_one_machine_need_ports_of_their_own(endpoint, replay, message):
    config = KvEventsConfig(True, endpoint=endpoint, replay_endpoint=replay)
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        config.check_servers(2)


def test_the_servers_cache_is_the_one_that_is_published(monkeypatch):
    cache = PrefixCache(PageAllocator(8, PAGE_SIZE))
    models = SimpleNamespace(engine=SimpleNamespace(prefix_cache=cache))
    for name, made in (("load", models), ("load_chat_template", None), ("compile_programs", None)):
        monkeypatch.setattr(f"jaxspec.commands.serve_loading.{name}", lambda *_, made=made, **__: made)
    config = f'{{"enable_kv_cache_events": true, "endpoint": "{free_endpoint()}"}}'
    with contextlib.ExitStack() as stack:
        arguments = parse_arguments(["--page-size", "4", "--kv-events-config", config, "--sampling-defaults", "openai"])
        serve.load_all(arguments, stack)
        publisher = cache.observer
        assert isinstance(publisher, Publisher) and publisher._page_size == 4
        cache.flush()
    assert publisher._number == 1 and not publisher._threads[0].is_alive(), "closed with the rest, and not before"
