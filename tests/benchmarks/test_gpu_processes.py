"""The GPU benchmark's processes: what fails, hangs or is out of time costs no more than it must."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import worker as gpu_worker
from benchmarks.gpu.lab import Skip
from benchmarks.gpu.supervisor import Supervisor
from benchmarks.options import RESULTS


def worker(sections: dict, deadline: float = float("inf")) -> list[dict]:
    """What a worker says about these sections."""
    messages: list[dict] = []
    lab = SimpleNamespace()
    gpu_worker.run_sections(list(sections), sections, lab, deadline, lambda **message: messages.append(message))  # type: ignore
    return [message for message in messages if message["kind"] not in ("section", "case", "finished")]


def test_a_failing_case_or_section_does_not_stop_the_others():
    def breaks() -> dict:
        raise RuntimeError("no such kernel")

    def refuses() -> dict:
        raise Skip("too large")

    def broken_section(lab):
        raise KeyError("cases")

    def out_of_memory() -> dict:
        raise RuntimeError("RESOURCE_EXHAUSTED: 9 bytes")

    first = [({"n": 1}, breaks), ({"n": 2}, refuses), ({"n": 3}, out_of_memory), ({"n": 4}, lambda: {"found": 5})]
    said = worker({"a": lambda lab: first, "b": broken_section, "c": lambda lab: [({}, lambda: {"found": 6})]})
    assert [(message["kind"], message["section"]) for message in said] == [
        ("failed", "a"), ("skipped", "a"), ("skipped", "a"), ("row", "a"), ("failed", "b"), ("row", "c"),
    ]  # fmt: skip
    assert said[0]["error"] == "RuntimeError: no such kernel" and said[1]["reason"] == "too large"
    assert said[3]["row"] == {"n": 4, "found": 5}


def test_a_device_that_no_longer_works_ends_the_worker(monkeypatch):
    def breaks() -> dict:
        raise RuntimeError("illegal address")

    monkeypatch.setattr(gpu_worker.jnp, "arange", lambda _: breaks())
    with pytest.raises(gpu_worker.DeviceLost, match="illegal address"):
        worker({"a": lambda lab: [({}, breaks)]})


def test_cases_that_may_not_end_in_time_are_skipped():
    def slow() -> dict:
        time.sleep(0.3)
        return {}

    said = worker({"a": lambda lab: [({"n": n}, slow) for n in range(3)]}, deadline=time.time() + 0.5)
    assert [message["kind"] for message in said] == ["row", "skipped", "skipped"]
    assert said[1]["reason"].startswith("time budget: ")


def fake_worker(tmp_path: Path, text: str) -> list[str]:
    """A worker's command: Python with `task` and `say` and then this text."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, sys, time\ntask = json.loads(sys.argv[1])\n"
        "def say(**message): print(json.dumps(message), flush=True)\n"
        "say(kind='environment', environment={'platform': 'cpu', 'devices': ['cpu']})\n" + text
    )
    return [sys.executable, str(script)]


CRASHES = """
for section in task["sections"]:
    say(kind="section", section=section, cases=2)
    say(kind="case", section=section, case={"n": 1})
    say(kind="row", section=section, row={"found": 1, "bandwidth": task["bandwidth"]})
    say(kind="case", section=section, case={"n": 2})
    if section == "b": sys.exit("kernel died")
    if section == "c": time.sleep(60)
    say(kind="finished", section=section, seconds=1.0)
"""


def test_a_worker_that_dies_or_hangs_costs_only_its_section(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.supervisor.OTHER_SILENCE", 1.0)
    supervisor = Supervisor("tiny", time.time() + 30, "", lambda _: None, fake_worker(tmp_path, CRASHES))
    supervisor.run(["a", "b", "c", "d"])
    assert [len(found["rows"]) for found in supervisor.results.values()] == [1, 1, 1, 1]
    (died,), (hung,) = supervisor.results["b"]["failed"], supervisor.results["c"]["failed"]
    assert died["case"] == {"n": 2} and "status 1; last output: kernel died" in died["error"]
    assert hung["error"].startswith("the worker hung for 1 s") and supervisor.failures == 2
    assert "seconds" in supervisor.results["d"]


def test_the_budget_ends_a_worker_and_skips_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.supervisor.GRACE", 0.5)
    supervisor = Supervisor("tiny", time.time() + 1, "", lambda _: None, fake_worker(tmp_path, "time.sleep(60)"))
    started = time.time()
    supervisor.run(["a", "b"])
    assert time.time() - started < 10
    assert [supervisor.results[name]["skipped"][0]["reason"][:11] for name in "ab"] == ["time budget"] * 2
    assert supervisor.failures == 0


def test_importing_the_starting_process_leaves_the_device_alone():
    """Else it would hold memory that its workers and the peer need."""
    code = "import benchmarks.gpu; from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", code], cwd=RESULTS.parents[1], check=True)
