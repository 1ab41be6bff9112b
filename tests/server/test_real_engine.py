"""The server over the real engine, on a tiny random model: what comes over HTTP is what the engine makes."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest

from jaxspec.config import SpecConfig
from jaxspec.engine.engine import Engine
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.model import ServedModel
from jaxspec.testing import random_head, tiny_engine, tiny_target, write_head, write_target
from tests.server.conftest import serving, wait_until
from tests.server.fakes import byte_tokenizer

PROMPTS = ["hello", "The quick brown fox jumps over", "x", "def f(x):\n    return"]
LENGTH = 24


def new_engine() -> Engine:
    return tiny_engine(SpecConfig(2, 2, 4), target=tiny_target(vocab_size=256))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What the engine makes of PROMPTS, one after the other, without a server."""
    engine, outputs = new_engine(), []
    for prompt in PROMPTS:
        engine.add(tuple(prompt.encode()), SamplingParams(max_tokens=LENGTH, temperature=0))
        while engine.has_work:
            outputs += [update.output for update in engine.step() if update.output]
    return [list(output.token_ids) for output in outputs]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return new_engine()


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[httpx.Client]:
    model = ServedModel("tiny", engine.context_length, engine.spec, byte_tokenizer())
    with serving(engine, model) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def generate(http: httpx.Client, prompt: str, **fields) -> dict:
    body = {"text": prompt, "sampling_params": {"max_new_tokens": LENGTH, "temperature": 0}, **fields}
    response = http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_what_comes_over_http_is_what_the_engine_makes(http: httpx.Client, expected: list[list[int]]):
    for prompt, token_ids in zip(PROMPTS, expected, strict=True):
        answer = generate(http, prompt)
        assert answer["output_ids"] == token_ids
        meta = answer["meta_info"]
        assert meta["spec_verify_ct"] * meta["spec_accept_length"] == pytest.approx(LENGTH - 1, abs=0.01)


def test_requests_at_once_do_not_change_each_other(http: httpx.Client, expected: list[list[int]]):
    answers: dict[int, list[int]] = {}
    threads = [
        threading.Thread(
            target=lambda number: answers.update({number: generate(http, PROMPTS[number % 4])["output_ids"]}), args=[n]
        )
        for n in range(8)  # more than max_running_requests
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[number] for number in range(8)] == expected * 2


def test_a_seed_repeats_a_sample(http: httpx.Client):
    def sample(seed: int) -> str:
        body = {"prompt": "hello", "max_tokens": LENGTH, "temperature": 0.9, "seed": seed}
        return http.post("/v1/completions", json=body).json()["choices"][0]["text"]

    assert sample(1) == sample(1) != sample(2)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x", "stop_token_ids": [256]}, "stop_token_ids"),
        ({"prompt": "x", "max_tokens": 256}, "max_tokens"),
        ({"prompt": "x" * 256}, "prompt"),
        ({"prompt": ["x", [300]]}, "prompt"),
    ],
)
def test_what_the_engine_refuses_is_a_400(http: httpx.Client, expected: list[list[int]], body: dict, field: str):
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], field in error["message"]) == (field, True)
    assert generate(http, PROMPTS[0])["output_ids"] == expected[0]


def test_clients_that_hang_up_leave_nothing_behind(http: httpx.Client, engine: Engine, expected: list[list[int]]):
    for number in range(6):
        body = {"text": PROMPTS[number % 4], "stream": True, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        with http.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            for _ in range(number):
                next(lines)
    generated = engine.stats().generated_tokens
    wait_until(lambda: engine.stats().running == 0 and engine.stats().waiting == 0)
    assert engine.stats().used_pages == 0
    assert engine.stats().generated_tokens - generated < 6 * 100  # they were aborted, not finished
    assert generate(http, PROMPTS[0])["output_ids"] == expected[0]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("checkpoints")
    target = tiny_target(vocab_size=256)
    write_target(directory / "tiny", target)
    write_head(directory / "head", random_head(target.config))
    byte_tokenizer().save_pretrained(directory / "tiny")
    return ["--model-path", str(directory / "tiny"), "--speculative-draft-model-path", str(directory / "head")]


def test_the_command(checkpoints: list[str], expected: list[list[int]]):
    """python -m jaxspec.serve, as users run it: loads, says when it is ready, answers, and ends in order on SIGTERM."""
    flags = """--speculative-num-steps 2 --speculative-eagle-topk 2 --speculative-num-draft-tokens 4 --max-running-requests 1
        --chunked-prefill-size 16 --page-size 8 --context-length 32 --port 0"""
    command = [sys.executable, "-m", "jaxspec.serve", *checkpoints, *flags.split()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = ""
        try:
            for line in process.stderr:
                log += line
                if ready := re.search(r"tiny is ready at (http://127\.0\.0\.1:\d+)", line):
                    break
            else:
                pytest.fail(log)
            url = ready[1]
            assert "max_running_requests=1" in log and "draft tree 2/2/4" in log
            assert f"curl {url}/v1/completions" in process.stderr.readline()
            with httpx.Client(base_url=url, timeout=60) as http:
                assert generate(http, PROMPTS[0])["output_ids"] == expected[0]
                assert http.post("/v1/completions", json={"prompt": ""}).status_code == 400
                with http.stream("POST", "/generate", json={"text": "x", "stream": True}) as response:  # still running
                    lines = response.iter_lines()
                    next(lines)
                    process.send_signal(signal.SIGTERM)
                    assert list(lines)[-2:] == ["data: [DONE]", ""]
            log = process.stderr.read()
            assert process.wait(30) == 0
            assert "Decode batch, #running-req: 1" in log and "Traceback" not in log
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("command", "said", "status"),
    [
        (["--model-path", "/no/such/directory"], "/no/such/directory", 2),
        (["--host", "203.0.113.1"], "203.0.113.1:30000", 1),
        (["--host", "no-such-host.invalid"], "no-such-host.invalid", 1),
    ],
)
def test_a_start_that_fails_ends_in_one_clear_line(command: list[str], said: str, status: int):
    ended = subprocess.run([sys.executable, "-m", "jaxspec.serve", *command], capture_output=True, text=True)
    assert ended.returncode == status
    assert "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("python -m jaxspec.serve: error: ") and said in last
