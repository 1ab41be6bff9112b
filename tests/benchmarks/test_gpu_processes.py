"""The GPU benchmark's processes: what fails, hangs or is out of time costs no more than it must."""

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest

from benchmarks.gpu import worker as gpu_worker
from benchmarks.gpu.command import Ended, process, run_parts
from benchmarks.gpu.lab import Lab, Skip
from benchmarks.gpu.parts import GRACE, PARTS, Part, Task
from benchmarks.gpu.sizes import FULL
from benchmarks.gpu.tables import Results, by_part
from benchmarks.gpu.worker import cases_of, run_cases


def breaks(message: str) -> dict:
    raise RuntimeError(message)


def refuses() -> dict:
    raise Skip("too large")


def test_a_failing_case_does_not_stop_the_others():
    found: list[Callable[[], dict]] = [
        partial(breaks, "no such kernel"),
        refuses,
        partial(breaks, "RESOURCE_EXHAUSTED: 9 bytes"),
        lambda: {"found": 5},
    ]
    said = list(run_cases(Task("a", "tiny"), (({"n": n}, measure) for n, measure in enumerate(found))))
    assert said[::2] == [{"starts": {"n": n}} for n in range(4)]
    assert said[1] == {"case": {"n": 0}, "failed": "RuntimeError: no such kernel"}
    assert said[3] == {"case": {"n": 1}, "skipped": "too large"} and "RESOURCE" in said[5]["skipped"]
    assert said[7] == {"case": {"n": 3}, "row": {"found": 5}}


def test_a_device_that_no_longer_works_ends_the_process(monkeypatch):
    monkeypatch.setattr(gpu_worker.jnp, "arange", lambda _: breaks("illegal address"))
    with pytest.raises(RuntimeError, match="illegal address"):
        gpu_worker.check_device()


@pytest.mark.parametrize(("deadline", "measured"), [(100.0, [0]), (10.0, [])])
def test_a_part_whose_turn_is_over_runs_its_first_case_only(deadline, measured):
    task = Task("a", "tiny", until=10.0, deadline=deadline)
    said = list(run_cases(task, (({"n": n}, dict) for n in range(3)), lambda: 50.0))
    assert [message["case"]["n"] for message in said if "row" in message] == measured
    assert [message["case"]["n"] for message in said if "skipped" in message] == list(range(len(measured), 3))


class Clock:
    """A clock that stands still unless somebody works, and ends their process as the watchdog does."""

    now, end = 0.0, float("inf")

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> dict:
        self.now = min(self.now + seconds, self.end)
        if self.now == self.end:
            raise SystemExit
        return {"bytes_per_second": 1.0, "operations_per_second": 1.0}


@cache
def names_of(name: str) -> list[dict]:
    """The cases of a part at full size."""
    (part,) = (part for part in PARTS if part.name == name)
    return [case for case, _ in cases_of(part, Lab(FULL, 1.0, 1.0))]


def run(parts: tuple[Part, ...], start: Callable[[Task], Iterator[dict]], clock: Clock, seconds: float) -> Results:
    said: list[dict] = []
    run_parts(parts, Task(None, "full", deadline=seconds - GRACE), said.append, start, clock)
    return by_part(said)


PROCESS = 10.0
"""Seconds until a process has JAX, the device and the weights."""
SECONDS = {"probe": 3.0, "copy": 5.0, "cycle": 50.0, "flags": 40.0, "text": 30.0, "engine": 60.0}
"""What one case is assumed to take. Compiling a cycle of 32 layers took 24 to 57 s on two shared cores (docs/gpu.md)."""
KNOWN_PROGRAM = 5.0
"""A cycle whose program the case before has compiled."""


@pytest.mark.variants
@pytest.mark.parametrize("slower", [0.5, 1.0, 1.15])
def test_ten_minutes_reach_all_that_matters_most(slower):
    """Kernels, the copy, cycles of every kind, settings of XLA, text and the engine."""
    clock = Clock()

    def start(task: Task) -> Iterator[dict]:
        cases, last = [], None
        for name in names_of(str(task.part)):
            known = task.part == "cycle" and name["tree"] == last
            seconds, last = KNOWN_PROGRAM if known else SECONDS.get(str(task.part), 30.0), name.get("tree")
            cases.append((name, partial(clock.work, slower * seconds)))
        try:
            clock.work(slower * PROCESS)
            yield from run_cases(task, iter(cases), clock)
        except SystemExit:
            raise Ended("Timeout (") from None

    clock.end = 570.0
    clock.work(slower * PROCESS)  # to find the device
    found = run(PARTS, start, clock, 570.0)
    assert clock() <= 570
    rows = {part: results["rows"] for part, results in found.items()}
    assert {"rms_norm", "cutoff", "tree_attention, 16 bits"} <= {row["kernel"] for row in rows["probe"]} and rows["copy"]
    measured = [(row["tree"], row["sampling"]) for row in rows["cycle"]]
    assert measured[:9] == list(itertools.product(["plain", "3/1/4", "7/1/8"], ["greedy", "temperature", "top_p"]))
    assert rows["flags"] and rows["text"] and rows["engine"]


def test_a_part_alone_gets_all_the_time():
    clock = Clock()
    (flags,) = (part for part in PARTS if part.name == "flags")
    cases = [({"n": n}, partial(clock.work, 60.0)) for n in range(9)]
    found = run((flags,), lambda task: run_cases(task, iter(cases), clock), clock, 570.0)
    assert len(found["flags"]["rows"]) == 9 and clock() == 540


PROCESS_OF_CASES = """
import faulthandler, json, sys, time
task = json.loads(sys.argv[1])
def say(**message): print(json.dumps(message), flush=True)
if task["part"] == "never begins": sys.exit("no driver")
for n in range(task["first"], 4):
    say(starts={"n": n})
    if task["part"] == "dies" and n == 1: sys.exit("kernel died")
    if task["part"] == "hangs" and n == 2: faulthandler.dump_traceback_later(0.3, exit=True); time.sleep(60)
    if task["part"] == "always dies": print('{"case": {"n"', end="", flush=True); sys.exit(9)
    broken = task["part"] == "breaks the device" and n == 2
    say(case={"n": n}, **({"failed": "wrong"} if broken else {"row": {}}))
    if broken: sys.exit("illegal address")
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> Results:
    """Parts whose processes end early in different ways."""
    script = tmp_path_factory.mktemp("gpu") / "process.py"
    script.write_text(PROCESS_OF_CASES)
    start = partial(process, command=[sys.executable, str(script)])
    names = ("fine", "dies", "hangs", "breaks the device", "always dies", "never begins")
    said: list[dict] = []
    run_parts([Part(name, "", "") for name in names], Task(None, "tiny"), said.append, start)
    return {name: by_part([{**line, "part": "copy"} for line in said if line["part"] == name])["copy"] for name in names}


@pytest.mark.parametrize(
    ("part", "measured", "failed"),
    [
        ("fine", [0, 1, 2, 3], []),
        ("dies", [0, 2, 3], [("1", "the process ended with status 1: kernel died")]),
        ("hangs", [0, 1, 3], [("2", "the process ended with status 1: Timeout (")]),
        ("breaks the device", [0, 1, 3], [("2", "wrong")]),
        ("always dies", [], [(n, "the process ended with status 9: it said nothing") for n in "012"]),
        ("never begins", [], [("all", "the process ended with status 1: no driver")]),
    ],
)
def test_a_process_that_ends_early_costs_only_its_case(processes, part, measured, failed):
    found = processes[part]
    assert [row["n"] for row in found["rows"]] == measured and "seconds" in found
    assert [
        (case, reason[: len(expected)]) for (case, reason), (_, expected) in zip(found["failed"], failed, strict=True)
    ] == failed
    left_out = [("all", "3 processes ended early: the rest is left out")] if part == "always dies" else []
    assert found["skipped"] == left_out


def test_the_end_of_the_budget_is_no_failure():
    clock = Clock()

    def start(task: Task) -> Iterator[dict]:
        yield {"starts": {"n": 0}}
        clock.work(1000.0)
        raise Ended("the process ended with status 1: Timeout (")

    found = run((Part("copy", "", ""), Part("cycle", "", "")), start, clock, 570.0)
    assert [found[part]["skipped"][0][1][:11] for part in ("copy", "cycle")] == ["time budget"] * 2
    assert not found["copy"]["failed"]


def test_a_process_that_hangs_says_where_and_the_starting_one_leaves_the_device_alone():
    """The starting process would hold memory that its workers and the peer need."""
    code = (
        "import time, benchmarks.gpu\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "from benchmarks.gpu import parts, worker\n"
        "def stuck(): time.sleep(60)\n"
        "worker.watch(0.0, parts.Task('copy', 'tiny')); stuck()"
    )
    with pytest.raises(
        Ended, match=r'status 1: Timeout \(0:00:01\)! \(most recent call first\): File "<string>", line \d+ in stuck'
    ):
        list(process(Task(None, "tiny"), [sys.executable, "-c", code]))
