"""Our side of the comparison with transformers on a GPU: starts its process, and sets its step beside our plain cycle."""

import json
import subprocess
import time
from pathlib import Path
from statistics import median

from jaxspec.checkpoints.exporting import hf_config

from .sizes import SIZES, Size
from .supervisor import GRACE, Supervisor

START = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
"""Not the file by its name: that puts its folder first among those that libraries are imported from."""
LONGEST = 150.0
"""Seconds that the peer gets at most, most of which torch.compile takes."""


def run_peer(supervisor: Supervisor, python: str, size_name: str, deadline: float) -> None:
    """Puts a section `peer` into the results; without torch it is skipped."""
    started = time.time()
    supervisor.take({"kind": "section", "section": "peer", "cases": 2})
    left = min(LONGEST, deadline + GRACE - started)
    if started > deadline:
        supervisor.skip("peer", {}, "time budget: no time was left for this section")
    else:
        take_answer(supervisor, ask(python, SIZES[size_name], size_name != "tiny", left))
    supervisor.take({"kind": "finished", "section": "peer", "seconds": time.time() - started})


def ask(python: str, size: Size, cuda: bool, seconds: float) -> dict:
    """What the process answers; {"error": ...} if it does not."""
    task = {
        "config": hf_config(size.target),
        "context": size.goal_context,
        "steps": 20 if cuda else 2,
        "samples": size.samples,
        "cuda": cuda,
    }
    command = [python, "-c", START, str(Path(__file__).with_name("peer.py")), json.dumps(task)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer after {seconds:.0f} s"}
    except OSError as error:
        return {"error": f"{python} can't be started: {error}"}
    except json.JSONDecodeError:
        return {"error": f"status {done.returncode}, {' '.join(done.stderr.split())[-500:]}"}


def take_answer(supervisor: Supervisor, answer: dict) -> None:
    """Rows for the steps that were timed, and our plain cycle of the same run beside them."""
    if "missing" in answer:
        reason = f"{answer['missing']}: install torch and transformers, or name a Python that has them with --torch-python"
        supervisor.skip("peer", {}, reason)
        return
    if "error" in answer:
        supervisor.take({"kind": "failed", "section": "peer", "case": {}, "error": answer["error"]})
        return
    ours = [row for row in supervisor.results.get("cycle", {}).get("rows", []) if row["tree"] == "plain"]
    for name in ("not compiled", "compiled"):
        timed = answer.pop(name)
        full_name = f"transformers, {name}"
        if "error" in timed:
            supervisor.take({"kind": "failed", "section": "peer", "case": {"name": full_name}, "error": timed["error"]})
            continue
        row = {"name": full_name, **timed, **answer}
        if ours:
            row["over_plain_cycle"] = median(timed["milliseconds"]) / median(ours[0]["milliseconds"])
        supervisor.take({"kind": "row", "section": "peer", "row": row})
