"""The server over the real engine, on a tiny random model: what comes over HTTP is what the engine makes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxspec.commands.replicas import LOOPBACK, free_ports
from jaxspec.engine.engine import Engine
from jaxspec.engine.hosts import KEY, LEAST_KEY
from jaxspec.engine.request import GenerationRequest
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.model import ServedModel
from jaxspec.testing import engine_target, random_eagle, tiny_engine, write_head, write_target
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.tree_shape import TreeShape
from tests.engine.served import served
from tests.live_server import running_server
from tests.server.conftest import CHAT, COMPLETIONS, USER, serving, wait_until
from tests.server.fakes import byte_tokenizer

PROMPTS = ["hello", "The quick brown fox jumps over", "x", "def f(x):\n    return"]
LENGTH = 24


def new_engine() -> Engine:
    target = engine_target(vocab_size=256)
    return tiny_engine(TreeShape(2, 2, 4), target=target, head=random_eagle(target.config))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What the engine makes of PROMPTS, one after the other, without a server."""
    engine, greedy = new_engine(), SamplingParams(max_tokens=LENGTH, temperature=0)
    return [served(engine, GenerationRequest(tuple(prompt.encode()), greedy))[0].output for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return new_engine()


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[httpx.Client]:
    tokenizer = byte_tokenizer()
    model = ServedModel("tiny", engine.context_length, engine.tree, tokenizer, ChatTemplate.of_model(tokenizer))
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
    with ThreadPoolExecutor(8) as pool:  # more than max_running_requests
        answers = pool.map(lambda prompt: generate(http, prompt)["output_ids"], PROMPTS * 2)
    assert list(answers) == expected * 2


def complete(http: httpx.Client, **body) -> dict:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_n_completions_are_those_of_the_seeds(http: httpx.Client):
    body = {"prompt": PROMPTS[1], "max_tokens": 12, "temperature": 0.9, "ignore_eos": True}
    several = complete(http, **body, n=3, seed=5)
    alone = [complete(http, **body, seed=seed) for seed in (5, 6, 7)]
    assert [choice["text"] for choice in several["choices"]] == [answer["choices"][0]["text"] for answer in alone]
    assert len({choice["text"] for choice in several["choices"]}) == 3
    assert several["usage"]["prompt_tokens"] == len(PROMPTS[1]) and several["usage"]["completion_tokens"] == 36


def test_all_parameters_at_once(http: httpx.Client):
    fields = {
        "top_p": 0.9, "top_k": 20, "min_p": 0.01, "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1,
        "logit_bias": {"101": 3}, "min_tokens": 5, "max_tokens": 12, "seed": 3, "priority": 2, "temperature": 1.2,
    }  # fmt: skip
    first, second = (complete(http, prompt="hello", **fields)["choices"][0]["text"] for _ in range(2))
    assert first == second
    allowed = complete(http, prompt="hello", max_tokens=8, allowed_token_ids=[97, 98], ignore_eos=True)["choices"][0]["text"]
    assert len(allowed) == 8 and set(allowed) <= {"a", "b"}


def test_logprobs(http: httpx.Client):
    """A text scored as a prompt gets the numbers that it got when it was made, and greedy tokens are the likeliest."""
    prompt = list(b"hello")
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
    made = http.post("/generate", json=body | {"return_logprob": True, "top_logprobs_num": 3}).json()
    entries, top = made["meta_info"]["output_token_logprobs"], made["meta_info"]["output_top_logprobs"]
    assert [token for _, token, _ in entries] == made["output_ids"] == [best[0][1] for best in top]
    assert all(len(best) == 3 and best == sorted(best, key=lambda each: -each[0]) for best in top)

    scored = complete(http, prompt=prompt + made["output_ids"], max_tokens=1, echo=True, logprobs=1, temperature=0)
    [choice] = scored["choices"]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {5 + 8 + 1}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][5:-1] == pytest.approx([logprob for logprob, _, _ in entries], abs=1e-4)
    best = [max(each.values()) for each in logprobs["top_logprobs"][5:-1]]
    assert best == pytest.approx(logprobs["token_logprobs"][5:-1])  # as lm-eval tells that a text is greedy

    entries_of_generate = http.post("/generate", json=body | {"input_ids": prompt + made["output_ids"], "return_logprob": True,
                                                "logprob_start_len": 5}).json()["meta_info"]["input_token_logprobs"]  # fmt: skip
    assert [token for _, token, _ in entries_of_generate] == made["output_ids"]
    assert entries_of_generate[0][0] is None
    assert [each[0] for each in entries_of_generate[1:]] == pytest.approx([each[0] for each in entries[1:]], abs=1e-4)


@pytest.mark.parametrize(
    ("path", "asked"), [(COMPLETIONS, {"prompt": "x", "logprobs": 1}), (CHAT, {"messages": USER, "logprobs": True})]
)
def test_streamed_logprobs(http: httpx.Client, path: str, asked: dict):
    """One entry per token, whenever its text comes."""
    body = {"max_tokens": LENGTH, "seed": 1, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}, **asked}
    lines = [line.removeprefix("data: ") for line in http.post(path, json=body).text.split("\n\n")[:-2]]
    *events, last = map(json.loads, lines)
    objects = [event["choices"][0]["logprobs"] or {} for event in events]
    assert sum(len(each.get("content", each.get("tokens", []))) for each in objects) == last["usage"]["completion_tokens"] == LENGTH


def test_cached_tokens_and_flushing(http: httpx.Client):
    prompt = "A prompt that no other test here has, of many pages."

    def cached() -> int:
        return complete(http, prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0
    assert 48 <= cached() <= len(prompt)  # 13 pages of 4 tokens
    assert generate(http, prompt)["meta_info"]["cached_tokens"] > 0
    assert http.post("/flush_cache").status_code == 200
    assert cached() == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "x", "logit_bias": {"256": 1}}, "logit_bias"),
        ({"prompt": "x", "allowed_token_ids": [256]}, "allowed_token_ids"),
        ({"prompt": [256], "echo": True, "logprobs": 1}, "prompt"),
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


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("checkpoints")
    target = engine_target(vocab_size=256)
    write_target(directory / "tiny", target)
    write_head(directory / "head", random_eagle(target.config))
    byte_tokenizer().save_pretrained(directory / "tiny")
    return ["--model-path", str(directory / "tiny"), "--speculative-draft-model-path", str(directory / "head")]


def test_the_command(checkpoints: list[str], expected: list[list[int]]):
    """python -m jaxspec.serve, as users run it: loads, says when it is ready, answers, and ends in order on SIGTERM."""
    flags = """--speculative-num-steps 2 --speculative-eagle-topk 2 --speculative-num-draft-tokens 4 --max-running-requests 2
        --chunked-prefill-size 16 --page-size 4 --speculative-request-trees none --port 0"""  # programs of new_engine
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
            assert "max_running_requests=2" in log and "draft tree 2/2/4" in log and "--random-seed " in log
            assert f"curl {url}/v1/chat/completions" in process.stderr.readline()  # its tokenizer has a chat template
            with httpx.Client(base_url=url, timeout=60) as http:
                assert generate(http, PROMPTS[0])["output_ids"] == expected[0]
                drafts = {"algorithm": "EAGLE", "tree": "2/2/4", "trees": ["2/2/4"]}
                assert http.get("/v1/models").json()["data"][0]["speculative"] == drafts
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


@pytest.mark.exhaustive
def test_a_group_finishes_what_runs_when_every_process_is_told_to_end(checkpoints: list[str], tmp_path, monkeypatch):
    """As Kubernetes and Slurm do. SIGINT at rank 0 would be its second signal, if what the other told it had been its first."""
    monkeypatch.setenv(KEY, "k" * LEAST_KEY)
    flags = f"""--tp-size 2 --nnodes 2 --dist-init-addr {LOOPBACK}:{free_ports(1)[0]} --max-running-requests 1 --page-size 4
        --chunked-prefill-size 16 --speculative-request-trees none --node-rank""".split()
    with (
        subprocess.Popen([sys.executable, "-m", "jaxspec.serve", *checkpoints, *flags, "1"]) as other,
        running_server(tmp_path, *checkpoints, *flags, "0", usual=(), optimized=False) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        body = {"prompt": "x", "n": 8, "max_tokens": 99, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            other.terminate()
            wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
            os.kill(server.pid, signal.SIGINT)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert other.wait(30) == 0


@pytest.mark.parametrize(
    ("command", "said", "status"),
    [
        (["--model-path", "/no/such/directory", "--port", "0"], "/no/such/directory", 2),
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


def test_answers_fit_their_schema(http: httpx.Client):
    """Whole and streamed."""
    schema = {"type": "object", "properties": {"kind": {"enum": ["x", "yy"]}}, "required": ["kind"], "additionalProperties": False}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 1, "response_format": wrapped(schema)}
    whole = http.post("/v1/chat/completions", json=body, timeout=300).json()["choices"][0]
    assert json.loads(whole["message"]["content"])["kind"] in ("x", "yy") and whole["finish_reason"] == "stop"
    events = http.post("/v1/chat/completions", json=body | {"stream": True}).text.split("\n\n")[:-2]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(deltas) == whole["message"]["content"]
    refused = http.post("/v1/chat/completions", json=body | {"logit_bias": {}, "allowed_token_ids": [1]})
    assert refused.status_code == 400 and "response_format.json_schema.schema" in refused.json()["error"]["message"]
    stuck = http.post("/v1/completions", json={"prompt": "x", "regex": "aab|aac", "allowed_token_ids": [ord("a")]}, timeout=300)
    assert stuck.status_code == 400 and "leave no token that the grammar allows" in stuck.json()["error"]["message"]


def wrapped(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
