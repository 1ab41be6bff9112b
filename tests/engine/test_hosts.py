"""Several processes that run one engine: what they tell one another, who may join, how a group ends, and that it says the same."""

import ast
import contextlib
import errno
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import AuthenticationError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxspec.commands.replicas import LOOPBACK, free_ports
from jaxspec.decoding import programs
from jaxspec.decoding.cycle import Proposal
from jaxspec.decoding.programs import Program, ProposeProgram, Settlement, SettleProgram
from jaxspec.decoding.tree import Tree
from jaxspec.engine import connections, following, hosts, messages
from jaxspec.engine import host_group as module
from jaxspec.engine.following import PROGRAMS, Repeating, program_of
from jaxspec.engine.host_group import Follower, Leader
from jaxspec.engine.hosts import Hosts, group_key
from jaxspec.engine.messages import Arrays, Kept, described, pack, unpack
from jaxspec.engine.relay import relay
from jaxspec.models.registry import LoadedTarget
from jaxspec.rope import RopeConfig
from jaxspec.testing import engine_target, tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.engine.group_counts import SECONDS, TIMES, WAYS, end_group
from tests.engine.group_process import KEY, Stub
from tests.sets import exhaustive

# Options


def test_wrong_hosts_are_refused():
    for wrong, message in {
        (2, 2, "a:1"): "--node-rank must be from 0 to --nnodes - 1 = 1, got 2",
        (1, 1, None): "--node-rank must be from 0 to --nnodes - 1 = 0, got 1",
        (2, 0, None): "--nnodes 2 needs --dist-init-addr",
        (2, 0, "a"): "--dist-init-addr must be HOST:PORT with a port below 65535, got 'a'",
        (2, 0, "a:65535"): "must be HOST:PORT",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            Hosts(*wrong)
    hosts = Hosts(2, 1, "[::1]:5000")
    assert hosts.address == ("::1", 5000) and hosts.coordinator == "[::1]:5001"


def test_devices_are_shared_evenly():
    hosts = Hosts(2, 0, "a:1")
    hosts.check_devices(4, 1)
    Hosts().check_devices(3, 2)
    with pytest.raises(ValueError, match="--tp-size counts the devices of all hosts: 3 can't be divided by --nnodes 2"):
        hosts.check_devices(3, 1)
    with pytest.raises(ValueError, match="--dp-size 2 starts servers on one host"):
        hosts.check_devices(2, 2)


def test_the_key_is_in_the_environment():
    assert group_key({"JAXSPEC_GROUP_KEY": "k" * 16}) == b"k" * 16
    for environment in ({}, {"JAXSPEC_GROUP_KEY": "k" * 15}):
        with pytest.raises(ValueError, match=r"JAXSPEC_GROUP_KEY must hold a secret of at least 16 characters"):
            group_key(environment)


# Messages


@pytest.mark.parametrize("seed", range(5))
def test_arrays_arrive_as_they_were_sent(seed):
    """Of kept ones only what has changed is sent."""
    rng, sender, receiver = np.random.default_rng(seed), Arrays(), Arrays()
    tables = {batch: rng.integers(0, 99, (batch, 512), np.int32) for batch in (1, 8)}  # one is always sent whole
    for _ in range(40):
        batch = int(rng.choice([1, 8]))
        if rng.random() < 0.7:
            tables[batch] = tables[batch].copy()
            places = rng.integers(0, 512 * batch, rng.choice([0, 1, 3, 512 * batch]))
            tables[batch].reshape(-1)[places] = rng.integers(0, 99, len(places))
        other = rng.random((2, 0, 3) if rng.random() < 0.2 else (3,)).astype(np.float32)
        leaves = [Kept(tables[batch]), None, other, np.array([True, False])]
        header, rest = unpack(sender.encode(Stub(batch), leaves))
        assert header["launch"] == described(Stub(batch))
        kept, nothing, *others = receiver.decode(header, rest)
        assert nothing is None and isinstance(kept, Kept)
        for sent, came in zip([tables[batch], *leaves[2:]], [kept.values, *others], strict=True):
            np.testing.assert_array_equal(sent, came)
            assert sent.dtype == came.dtype


def test_little_is_sent_of_an_array_that_has_hardly_changed():
    arrays, table = Arrays(), np.zeros((8, 512), np.int32)
    sizes = []
    for place in (0, 1, 1):
        table = table.copy()
        table[0, place] = 1
        sizes.append(len(unpack(arrays.encode(Stub(), [Kept(table)]))[1]))
    assert sizes == [table.nbytes, 8, 0]


@pytest.mark.parametrize("wrong", [b"", b"\x05\0\0\0{}", b"\x02\0\0\0[]", b"\xff\xff\xff\xff{}"])
def test_what_is_no_message_is_refused(wrong):
    with pytest.raises(ValueError, match=r"message|Extra data|Expecting"):
        unpack(wrong)


def test_programs_are_named_in_messages():
    tree = TreeShape(3, 2, 6)
    of_rows = {"AdmitProgram": (), "MaskProgram": (), "LendProgram": (256,)}
    sizes = {**of_rows, "PrefillProgram": (64, 8, 2, True), "CatchUpProgram": (4, 8)}
    for name, kind in PROGRAMS.items():
        program = kind(*sizes.get(name, (4, 8, tree)))
        header, _ = unpack(pack({"compile": described(program)}))
        assert program_of(header["compile"]) == program
    kinds = {name for name, each in vars(programs).items() if name.endswith("Program") and hasattr(each, "run")}
    assert set(PROGRAMS) == kinds - {"Program"}


def test_nothing_is_pickled():
    """Connection's send and recv pickle; send_bytes and recv_bytes don't."""
    called = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for source in (module, messages)
        for node in ast.walk(ast.parse(Path(source.__file__).read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    assert {"send_bytes", "recv_bytes"} <= called and not called & {"send", "recv", "pickle", "marshal", "eval"}


# Who may join


class Joining(threading.Thread):
    """A leader that waits for the others."""

    def __init__(self, nnodes: int = 2, **options):
        super().__init__(daemon=True)
        self.hosts, self.options, self.leader, self.error = Hosts(nnodes, 0, f"{LOOPBACK}:{free_ports(1)[0]}"), options, None, None
        self.start()

    def run(self):
        try:
            self.leader = Leader(self.hosts, KEY, "the same", **{"patience": 20, **self.options})
        except Exception as error:
            self.error = error

    def follower(self, key: bytes = KEY, versions: str = "the same", rank: int = 1, nnodes: int = 2) -> Follower:
        return Follower(Hosts(nnodes, rank, self.hosts.dist_init_addr), key, versions, patience=20)


@pytest.fixture
def left(monkeypatch) -> list[tuple[int, str]]:
    """How processes would have ended, if this one did not stay."""
    left: list[tuple[int, str]] = []
    for each in (module, hosts):
        monkeypatch.setattr(each, "leave", lambda status, line="": left.append((status, line)))
    monkeypatch.setattr(module, "LEAVING", 0.05)
    return left


@contextlib.contextmanager
def joined(joining: Joining, left: list) -> Iterator[tuple[Leader, Follower]]:
    follower = joining.follower()
    joining.join(20)
    assert joining.leader is not None
    yield joining.leader, follower
    joining.leader.close()
    while not left:  # the follower has read the end
        time.sleep(0.01)
    follower._link.close()
    assert joining.leader._all_gone.wait(20)


def test_only_those_who_know_the_key_join(left, monkeypatch, caplog):
    """Others are refused, and one that says nothing does not keep the others waiting."""
    monkeypatch.setattr(module, "HANDSHAKE", 1)
    joining = Joining()
    with pytest.raises(AuthenticationError):
        joining.follower(key=b"another key, as long")
    while joining.is_alive() and "refused" not in caplog.text:
        time.sleep(0.01)
    silent = socket.create_connection(joining.hosts.address)
    with joined(joining, left), silent:
        assert "digest" in caplog.text
    assert left == [(0, "")]


def test_one_that_sends_a_byte_at_a_time_does_not_keep_the_others_waiting(left, monkeypatch, caplog):
    monkeypatch.setattr(module, "HANDSHAKE", 1)
    joining, stops = Joining(), threading.Event()
    deadline = time.monotonic() + 20
    while True:
        try:
            slow = socket.create_connection(joining.hosts.address)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def trickle() -> None:
        with contextlib.suppress(OSError):
            for byte in b"\0\0\0\xff" + bytes(255):
                slow.sendall(bytes([byte]))
                if stops.wait(0.3):
                    break

    thread = threading.Thread(target=trickle)
    thread.start()
    started = time.monotonic()
    with joined(joining, left), slow:
        assert time.monotonic() - started < 15
        stops.set()
    thread.join()


def test_a_rank_zero_that_does_not_know_the_key_is_refused(left):
    """The proof goes both ways: rank 0 is what others take orders from."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend():
            link = module.connection_of(listener.accept()[0], module.HANDSHAKE)
            with contextlib.suppress(AuthenticationError):
                module.deliver_challenge(link, KEY)  # of the answer it can't tell whether it is right
            with contextlib.suppress(EOFError, OSError):
                module.answer_challenge(link, KEY)

        threading.Thread(target=pretend, daemon=True).start()
        host, port = listener.getsockname()
        with pytest.raises(AuthenticationError):
            Follower(Hosts(2, 1, f"{host}:{port}"), b"the key that rank 0 lacks", "the same", patience=5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"versions": "another"}, "rank 1 has another, and rank 0 has the same"),
        ({"nnodes": 3, "rank": 2}, "rank 2 of 3 is none of the 2 of this group"),
    ],
)
def test_those_who_do_not_fit_are_told_why(left, wrong, message):
    joining = Joining()
    with pytest.raises(ValueError, match=message):
        joining.follower(**wrong)
    with joined(joining, left):
        pass


def test_a_process_tries_again_until_it_has_found_rank_zero(left, monkeypatch):
    """The network may be late, and what listens in its place may hang up."""
    find = socket.create_connection

    def unreachable(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    def hangs_up(*_: object, **__: object) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            connected = find(listener.getsockname())
            listener.accept()[0].close()
        return connected

    ways = iter([unreachable, hangs_up])
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: next(ways, find)(*a, **k))
    with joined(Joining(), left):
        assert next(ways, None) is None
    for never, reason in ((unreachable, "No route to host"), (hangs_up, "it hangs up")):
        monkeypatch.setattr(socket, "create_connection", never)
        with pytest.raises(TimeoutError, match=f"rank 0 does not answer at a:1 after 0.1 s: .*{reason}"):
            Follower(Hosts(2, 1, "a:1"), KEY, "the same", patience=0.1)


def test_who_starts_again_while_others_are_awaited_takes_its_place(left):
    joining = Joining(nnodes=3)
    first = joining.follower(nnodes=3)
    with pytest.raises(ValueError, match="rank 1 has joined already"):
        joining.follower(nnodes=3)
    with socket.socket(fileno=os.dup(first._link.fileno())) as ended:
        ended.shutdown(socket.SHUT_RDWR)
    others = [joining.follower(nnodes=3, rank=rank) for rank in (1, 2)]
    joining.join(20)
    assert joining.leader is not None and sorted(joining.leader._links.values()) == [1, 2]
    joining.leader.close()
    while left.count((0, "")) < 3:  # all have read the end, as the stand-in lets the first one go on
        time.sleep(0.01)
    for each in (first, *others):
        each._link.close()
    assert joining.leader._all_gone.wait(20)


def test_a_missing_process_is_named():
    joining = Joining(patience=0.1)
    joining.join(20)
    assert str(joining.error) == "no connection of rank 1 within 0.1 s"


# What is told


def test_a_program_is_used_when_all_have_compiled_it(left):
    with joined(Joining(), left) as (leader, follower):
        told, compiled = follower.messages(), []

        def compile_it(timed: bool) -> None:
            with leader.compiling(Stub(3), timed=timed):
                compiled.append("rank 0")
            compiled.append("both")

        thread = threading.Thread(target=compile_it, args=[True])
        thread.start()
        header, _ = next(told)
        assert header["compile"] == ("Stub", (3,)) and header["timed"] is True
        time.sleep(0.05)
        assert compiled == ["rank 0"]
        follower.answer(header["number"])
        thread.join(20)
        assert compiled == ["rank 0", "both"]

        threading.Thread(target=lambda: follower.answer(next(told)[0]["number"], "no memory")).start()
        with pytest.raises(RuntimeError, match="rank 1: no memory"):
            compile_it(timed=False)


def test_launches_arrive_in_their_order(left):
    with joined(Joining(), left) as (leader, follower):
        leader.pages(7, "digest")
        for number in range(200):
            leader.launch(Stub(), [Kept(np.array([number], np.int32)), None])
        told = follower.messages()
        assert next(told)[0] == {"pages": 7, "identity": "digest"}
        for number in range(200):
            header, data = next(told)
            kept, nothing = follower.arrays.decode(header, data)
            assert header["launch"] == ("Stub", (8,)) and kept.values.tolist() == [number] and nothing is None


def test_a_process_that_launches_for_long_does_not_count_as_gone(left, monkeypatch):
    """More waits for it than connections hold."""
    monkeypatch.setitem(connections.DEAD, "TCP_USER_TIMEOUT", 500)
    with joined(Joining(), left) as (leader, follower):
        for number in range(40):
            leader.launch(Stub(), [np.full(2**16, number, np.int32)])
        told = follower.messages()
        for number in range(40):
            [array] = follower.arrays.decode(*next(told))
            assert array[0] == array[-1] == number
        assert not left


@pytest.mark.parametrize(("number", "alone"), [(signal.SIGTERM, []), (signal.SIGINT, ["rank 1 of 2 was told twice to end"])])
def test_another_process_that_is_told_to_end_ends_the_group(left, monkeypatch, number, alone):
    """Two SIGTERM at once may come of one end of a service, two SIGINT come from a person."""
    ended: list[str] = []
    monkeypatch.setattr(module, "end", ended.append)
    stopped = threading.Event()
    with joined(Joining(on_stop=stopped.set), left) as (_, follower):
        follower.stop(number)
        assert stopped.wait(20) and not left
        follower.stop(number)
        assert ended == alone


def test_a_process_may_be_told_to_end_while_it_answers(left):
    """A signal's handler runs in the midst of what the main thread does, and must not wait for it."""
    stopped, handled = threading.Event(), []

    def compile_it() -> None:
        with pytest.raises(RuntimeError, match="no memory"), leader.compiling(Stub(3), timed=False):
            pass

    def told_to_end(*_: object) -> None:
        handled.append(time.monotonic())
        assert len(handled) < 500, "the handler waits for what it interrupted"
        follower.stop(signal.SIGINT)

    with joined(Joining(on_stop=stopped.set), left) as (leader, follower):
        before, compiling = signal.signal(signal.SIGALRM, told_to_end), threading.Thread(target=compile_it)
        compiling.start()
        number = next(follower.messages())[0]["number"]
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            follower.answer(number, "no memory" * 10**6)
            time.sleep(0.01)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        compiling.join(20)
        assert handled and stopped.wait(20) and not compiling.is_alive()


def test_of_jaxs_service_its_end_is_not_seen():
    """Bytes pass both ways, and the service sees the end of its client; it may come later than that."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        address = service.getsockname()
    host, _, port = relay(address).rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(b"one")
        with socket.create_server(address) as service:
            passed, _ = service.accept()
        passed.settimeout(20)
        assert passed.recv(9) == b"one"
        passed.sendall(b"two")
        assert client.recv(9) == b"two"
        passed.close()
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(9)
    with socket.create_connection((host, int(port)), timeout=20) as client, socket.create_server(address) as service:
        passed, _ = service.accept()
        client.close()
        passed.settimeout(20)
        assert passed.recv(9) == b""
        passed.close()


# The end


@pytest.mark.parametrize(("what", "times"), [("stub", 2), exhaustive("stub", TIMES["stub"]), exhaustive("load", TIMES["load"])])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_group_ends_as_one(victim, way, what, times):
    """Connections alone, and engines under load; the program tests.engine.group_counts prints the seconds."""
    for _ in range(times):
        assert end_group(what, victim, WAYS[way]) < SECONDS


def test_a_process_of_another_model_ends_as_one_with_wrong_settings(monkeypatch):
    ended: list[tuple[int, str]] = []
    monkeypatch.setattr(following, "leave", lambda *how: ended.append(how))
    Repeating(SimpleNamespace(programs=SimpleNamespace(digest=str), params="ours"), "rank 0's")  # type: ignore[arg-type]
    assert ended == [(2, "jaxspec: this process has another model, other options or other devices than rank 0")]


def test_models_of_one_shape_are_told_apart():
    def digest(target: LoadedTarget) -> str:
        runner = tiny_engine(PLAIN, target=target).runner
        return runner.programs.digest(runner.params)

    target, again, other_norm = engine_target(), engine_target(), engine_target()
    other_norm.params["norm"]["weight"] = 2 * other_norm.params["norm"]["weight"]
    other_rope = replace(target, config=replace(target.config, rope=RopeConfig(theta=5e5)))
    assert digest(target) == digest(again) and len({*map(digest, (target, other_norm, other_rope))}) == 3


def test_second_halves_take_what_was_proposed_for_them():
    """Plain ones too, which find all that they need in the message."""
    trees = TreeShape(0, 1, 1), TreeShape(1, 1, 2)
    proposals = {tree: Proposal(Tree(*4 * [np.zeros(1)]), None if tree.num_steps == 0 else 7) for tree in trees}
    said: list[Any] = []

    def inputs(program: Program) -> tuple[Any, ...]:
        memo = proposals[program.tree].memo
        return (0, 0, Settlement(0, 0, memo, 0)) if isinstance(program, SettleProgram) else (0, 0)

    def run(program: Program, _rows: Any, _page_table: Any, settlement: Any = None) -> Any:
        said.append(settlement and settlement.memo)
        return SimpleNamespace(proposal=proposals[program.tree])

    of_programs = SimpleNamespace(digest=str, inputs=inputs)
    placed = SimpleNamespace(get=lambda _program, _name, values: values)
    repeating = Repeating(SimpleNamespace(programs=of_programs, inputs=placed, run=run, params="the same"), "the same")  # type: ignore[arg-type]
    place, sent = [Kept(np.zeros(1)), Kept(np.zeros(1))], np.zeros(1)
    for tree in (*trees, *trees):
        repeating.launch(ProposeProgram(1, 1, tree), place)
        memo = [] if tree.num_steps == 0 else [None]
        repeating.launch(SettleProgram(1, 1, tree), [*place, sent, sent, *memo, sent])
    assert said == 2 * [None, None, None, 7]
