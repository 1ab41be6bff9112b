"""The GPU benchmark's processes: what fails, hangs or is out of time costs no more than it must."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import worker as gpu_worker
from benchmarks.gpu.lab import Skip
from benchmarks.gpu.parts import Part, Run
from benchmarks.gpu.supervisor import Supervisor
from benchmarks.gpu.worker import Task
from benchmarks.options import RESULTS


def worker(cases: list, **task) -> list[dict]:
    """What a worker says about the cases of a part."""
    messages: list[dict] = []
    lab = SimpleNamespace(compiling=0.0)
    gpu_worker.run_cases(
        Task("a", **task), lambda lab, run: cases, lab, lambda **message: messages.append(message)  # type: ignore
    )  # fmt: skip
    return [message for message in messages if message["kind"] not in ("cases", "case", "all")]


def test_a_failing_case_does_not_stop_the_others():
    def breaks() -> dict:
        raise RuntimeError("no such kernel")

    def refuses() -> dict:
        raise Skip("too large")

    def out_of_memory() -> dict:
        raise RuntimeError("RESOURCE_EXHAUSTED: 9 bytes")

    said = worker([({"n": 1}, breaks), ({"n": 2}, refuses), ({"n": 3}, out_of_memory), ({"n": 4}, lambda: {"found": 5})])
    assert [message["kind"] for message in said] == ["failed", "skipped", "skipped", "row"]
    assert said[0]["error"] == "RuntimeError: no such kernel" and said[1]["reason"] == "too large"
    assert said[3]["row"] == {"n": 4, "found": 5}


def test_a_case_that_wants_a_process_of_its_own_may_follow_skipped_ones():
    def refuses() -> dict:
        raise Skip("it runs on GPUs only")

    cases = [({"n": 1}, refuses), ({"n": 2}, refuses), ({"n": 3}, dict), ({"n": 4}, dict)]
    assert [message["kind"] for message in worker(cases, alone=True)] == ["skipped", "skipped", "row"]


def test_a_device_that_no_longer_works_ends_the_worker(monkeypatch):
    def breaks() -> dict:
        raise RuntimeError("illegal address")

    monkeypatch.setattr(gpu_worker.jnp, "arange", lambda _: breaks())
    with pytest.raises(gpu_worker.DeviceLost, match="illegal address"):
        worker([({}, breaks)])


def test_no_case_starts_after_the_deadline_or_one_that_was_started_before():
    def slow() -> dict:
        time.sleep(0.3)
        return {}

    said = worker([({"n": n}, slow) for n in range(3)], deadline=time.time() + 0.2, done=({"n": 0},))
    assert [(message["kind"], message.get("case")) for message in said] == [("row", None), ("skipped", {"n": 2})]
    assert said[1]["reason"].startswith("time budget: ")


def test_compiling_does_not_count_against_a_parts_time():
    lab = SimpleNamespace(compiling=0.0)
    task = Task("a", until=time.time() - 5)
    assert gpu_worker.out_of_time(task, lab) == "the part's share of the time was over"  # type: ignore
    lab.compiling = 60.0
    assert gpu_worker.out_of_time(task, lab) is None  # type: ignore


def fake_worker(tmp_path: Path, text: str) -> list[str]:
    """A worker's command: Python with `task` and `say` and then this text."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys, time\ntask = json.loads(sys.argv[1])\n"
        "def say(**message): print(json.dumps(message), flush=True)\n"
        "say(kind='environment', environment={'platform': 'cpu', 'devices': ['cpu']})\n" + text
    )
    return [sys.executable, str(script)]


CASES = """
say(kind="cases", part=task["part"], cases=4, left=4 - len(task["done"]))
for n in range(4):
    if {"n": n} in task["done"]: continue
    say(kind="case", part=task["part"], case={"n": n})
    if task["part"] == "dies" and n == 1: sys.exit("kernel died")
    if task["part"] == "hangs" and n == 2: time.sleep(60)
    if task["part"] == "compiles" and n == 0: say(kind="phase", phase="compile"); time.sleep(1.5)
    if task["part"] == "always dies": os._exit(9)
    say(kind="row", part=task["part"], row={"n": n, "flags": os.environ.get("XLA_FLAGS"), "run": task["run"]})
    if task["alone"]: sys.exit()
say(kind="all", part=task["part"])
"""


def supervise(tmp_path: Path, *parts: Part, seconds: float = 60, text: str = CASES) -> Supervisor:
    supervisor = Supervisor("tiny", time.time() + seconds, "", lambda _: None, fake_worker(tmp_path, text))
    supervisor.run(parts)
    return supervisor


def test_a_worker_that_dies_or_hangs_costs_only_its_case(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.supervisor.LIMITS", {"start": 30.0, "run": 1.0, "compile": 30.0})
    names = ("fine", "dies", "hangs", "compiles")
    results = supervise(tmp_path, *(Part(name, "", "") for name in names)).results
    found = {name: [row["n"] for row in results[name]["rows"]] for name in names}
    assert found == {"fine": [0, 1, 2, 3], "dies": [0, 2, 3], "hangs": [0, 1, 3], "compiles": [0, 1, 2, 3]}
    (died,), (hung,) = results["dies"]["failed"], results["hangs"]["failed"]
    assert died["case"] == {"n": 1} and "status 1; last output: kernel died" in died["error"]
    assert hung["case"] == {"n": 2} and hung["error"].startswith("the worker hung: run 1 s")


def test_a_part_whose_workers_always_die_is_given_up_unless_each_case_is_alone(tmp_path):
    together = supervise(tmp_path, Part("always dies", "", "")).results["always dies"]
    assert [len(together["failed"]), together["skipped"][0]["reason"]] == [3, "3 workers ended early: the rest is left out"]
    alone = supervise(tmp_path, Part("always dies", "", "", alone=True)).results["always dies"]
    assert [entry["case"] for entry in alone["failed"]] == [{"n": n} for n in range(4)]


def test_every_run_of_a_part_has_its_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    part = Part("fine", "", "", runs=(Run("as it is"), Run("other", "--b=2")), alone=True)
    rows = supervise(tmp_path, part).results["fine"]["rows"]
    assert [(row["run"], row["flags"]) for row in rows] == [("as it is", "--a=1")] * 4 + [("other", "--a=1 --b=2")] * 4


def test_the_budget_ends_a_worker_and_skips_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.supervisor.GRACE", 0.5)
    started = time.time()
    supervisor = supervise(tmp_path, Part("a", "", ""), Part("b", "", ""), seconds=1, text="time.sleep(60)")
    assert time.time() - started < 10
    assert [supervisor.results[name]["skipped"][0]["reason"][:11] for name in "ab"] == ["time budget"] * 2
    assert supervisor.failures == 0


def test_importing_the_starting_process_leaves_the_device_alone():
    """Else it would hold memory that its workers and the peer need."""
    code = "import benchmarks.gpu; from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", code], cwd=RESULTS.parents[1], check=True)
