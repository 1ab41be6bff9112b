"""lm-eval against the real server, with the server's tokenizer: its numbers are those that the server's own API tells."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.live_server import running_server
from tests.reference import FIXTURES
from tests.sets import needs_smollm2

TASKS = Path(__file__).parent / "lm_eval_task"
UNTIL, MAX_TOKENS = ["\n"], 24
"""As in text.yaml."""


@pytest.fixture(scope="module")
def documents() -> dict[str, list[dict]]:
    return {name: [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text().splitlines()] for name in ("choice", "text")}


def test_lm_eval_finds_what_the_api_tells(server, client, documents, tmp_path):
    scores, samples = evaluate(client("lm_eval", "lm-eval"), server.url, tmp_path)
    with httpx.Client(base_url=server.url, timeout=300) as http:
        likelihoods = [[likelihood(http, doc["prompt"], choice) for choice in doc["choices"]] for doc in documents["choice"]]
        texts = [written(http, doc["prompt"]) for doc in documents["text"]]

    found = [[sample["filtered_resps"][index] for index in (0, 1)] for sample in samples["jaxspec_choice"]]
    expected = [[greedy for _, greedy in each] for each in likelihoods]
    assert [[is_greedy == "True" for _, is_greedy in each] for each in found] == expected
    numbers = [float(logprob) for each in found for logprob, _ in each]
    assert numbers == pytest.approx([logprob for each in likelihoods for logprob, _ in each], abs=1e-3)
    assert {greedy for each in likelihoods for _, greedy in each} == {True, False}  # the documents show both
    chosen = [each.index(max(each)) for each in likelihoods]
    are_right = [choice == doc["answer"] for choice, doc in zip(chosen, documents["choice"], strict=True)]
    assert scores["jaxspec_choice"]["acc,none"] == mean(are_right)
    assert 0 < scores["jaxspec_choice"]["acc,none"] < 1

    assert [sample["filtered_resps"] for sample in samples["jaxspec_text"]] == [[text] for text in texts]
    right = [text == doc["answer"] for text, doc in zip(texts, documents["text"], strict=True)]
    assert scores["jaxspec_text"]["exact_match,none"] == mean(right)


@needs_smollm2
def test_smollm2_scores_as_in_transformers(client, tmp_path):
    """50 sentences with four endings each; tests/fixtures/smollm2/make.py has transformers' likelihoods."""
    program = client("lm_eval", "lm-eval")
    small = "--model-path smollm2 --max-running-requests 1 --context-length 64 --page-size 64 --chunked-prefill-size 64"
    with running_server(tmp_path, *small.split(), usual=()) as server:
        scores, samples = evaluate(program, server.url, tmp_path, ("jaxspec_sentences",))
    expected = json.loads((FIXTURES / "smollm2/texts.json").read_text())["endings"]
    documents = [json.loads(line) for line in (TASKS / "sentences.jsonl").read_text().splitlines()]
    right = [each.index(max(each)) == doc["answer"] for each, doc in zip(expected, documents, strict=True)]
    assert scores["jaxspec_sentences"]["acc,none"] == pytest.approx(mean(right)) and 0.5 < mean(right) < 1
    found = [float(logprob) for sample in samples["jaxspec_sentences"] for logprob, _ in sample["filtered_resps"]]
    assert found == pytest.approx([logprob for each in expected for logprob in each], abs=2e-3)


def evaluate(
    program: Path, url: str, folder: Path, tasks: Sequence[str] = ("jaxspec_choice", "jaxspec_text")
) -> tuple[dict, dict[str, list[dict]]]:
    """Runs lm-eval without network; returns the scores, and what was asked and answered, by task."""
    model = (
        f"model=jaxspec-demo,base_url={url}/v1/completions,tokenizer_backend=remote,max_length=1024,num_concurrent=4,max_retries=1"
    )
    command = [program, "run", "--model", "local-completions", "--model_args", model, "--tasks", ",".join(tasks)]
    command += ["--include_path", TASKS, "--output_path", folder / "out", "--log_samples"]
    offline = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    ended = subprocess.run(command, cwd=TASKS, env=os.environ | offline, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [results] = (folder / "out").rglob("results_*.json")
    samples = {}
    for path in (folder / "out").rglob("samples_*.jsonl"):
        task = path.name.removeprefix("samples_").rpartition("_")[0]
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        samples[task] = sorted(lines, key=lambda sample: sample["doc_id"])
    return json.loads(results.read_text())["results"], samples


def likelihood(http: httpx.Client, prompt: str, choice: str) -> tuple[float, bool]:
    """Log probability of the choice after the prompt, and whether each of its tokens is the likeliest: by /generate."""
    start, ids = (len(tokens(http, prompt)), tokens(http, prompt + choice))
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    answer = http.post("/generate", json=body | {"sampling_params": {"max_new_tokens": 1, "temperature": 0}})
    assert answer.status_code == 200, answer.text
    meta = answer.json()["meta_info"]
    own = meta["input_token_logprobs"][start:]
    assert [token for _, token, _ in own] == ids[start:]
    best = [top[0][1] for top in meta["input_top_logprobs"][start:]]
    return sum(logprob for logprob, _, _ in own), best == ids[start:]


def tokens(http: httpx.Client, text: str) -> list[int]:
    return http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]


def written(http: httpx.Client, prompt: str) -> str:
    params = {"max_new_tokens": MAX_TOKENS, "temperature": 0, "stop": UNTIL}
    return http.post("/generate", json={"text": prompt, "sampling_params": params}).json()["text"]


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)
