"""SmolLM2-135M-Instruct from its GGUF file, against transformers on the same file (tests/fixtures/smollm2/make.py)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.checkpoints.small_machine import MEMORY
from tests.live_server import optimizing, running_server
from tests.reference import FIXTURES
from tests.sets import needs_smollm2

pytestmark = [pytest.mark.exhaustive, needs_smollm2]
GOLDEN = FIXTURES / "smollm2"
SCRIPT = Path(__file__).with_name("smollm2_checks.py")


@pytest.fixture(scope="module")
def found():
    ended = subprocess.run([sys.executable, SCRIPT, GOLDEN], env=optimizing(), capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_logits(found):
    assert found["logits differ by"] < 1e-3


def test_greedy_answers(found):
    chats = json.loads((GOLDEN / "texts.json").read_text())["chats"]
    assert found["prompts"] == [chat["prompt"] for chat in chats]
    assert found["answers"] == [chat["answer"] for chat in chats]
    assert found["first answer"] == "The capital of France is Paris."


def test_its_own_head_drafts(found):
    """The answers above are made with it."""
    assert found["accept length"] > 1.5


def test_tokens_of_lines_in_22_scripts(found):
    expected = np.load(GOLDEN / "golden.npz")["lines"].tolist()
    assert len(expected) == 2000 and found["lines"] == expected
    assert found["lines that come back"] == 2000


def test_what_quantisation_costs():
    """Mean KL divergence from float32, and the accept length of one draft on the same text. 4 bits are few for so small a model."""
    script = SCRIPT.with_name("smollm2_quantised.py")
    ended = subprocess.run([sys.executable, script, GOLDEN], env=optimizing(), capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    for quantization, most in {"int8": 0.01, "fp8": 0.05, "int4": 0.6}.items():
        assert 0 < found[quantization]["KL"] <= most
        assert found[quantization]["accept length"] == pytest.approx(found["None"]["accept length"], rel=0.03)


def test_a_machine_with_3_gb_of_memory(tmp_path):
    """The server starts, says how large its cache is, and answers, with a peak below 2.5 GB."""
    with running_server(tmp_path, "--model-path", "smollm2", usual=(), module="tests.checkpoints.small_machine") as server:
        asked = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 40, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=300).json()
        peak = 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{server.pid}/status").read_text())[0])
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert re.search(r"cache +[\d.]+ [MG]B +\d+ tokens in \d+ pages", server.log.read_text())
    assert peak < 2.5e9 < MEMORY, f"{peak / 1e9:.2f} GB"
