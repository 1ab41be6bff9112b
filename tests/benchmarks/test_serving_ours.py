"""The load generator against our own server, on a tiny random model and on the fake engine: it understands both protocols."""

import json
from collections.abc import Iterator

import pytest

from benchmarks.options import BenchmarkError
from benchmarks.serving import main
from jaxspec.config import TreeShape
from jaxspec.server.model import ServedModel
from jaxspec.server.settings import ServerSettings
from jaxspec.testing import engine_target, random_eagle, tiny_engine
from jaxspec.text.chat_template import ChatTemplate
from tests.server.conftest import serving
from tests.server.fakes import CONTEXT, TREE, FakeEngine, byte_tokenizer

LENGTH = 6


@pytest.fixture(scope="module")
def tiny() -> Iterator[str]:
    """A server of a tiny model, on its URL."""
    target, tokenizer = engine_target(0, vocab_size=256), byte_tokenizer()  # its bytes are often characters
    engine = tiny_engine(TreeShape(2, 2, 4), target=target, head=random_eagle(target.config))
    model = ServedModel("tiny", engine.context_length, engine.tree, tokenizer, ChatTemplate.of_model(tokenizer))
    with serving(engine, model) as url:
        yield url


@pytest.fixture
def measure(tmp_path):
    """Runs the command; returns its status and results."""

    def run(url: str, *arguments: str) -> tuple[int, dict]:
        out, prompts = tmp_path / "out.jsonl", tmp_path / "prompts.txt"
        prompts.write_text("".join(f"text {number}\n" for number in range(5)))
        status = main(["--base-url", url, "--prompts", str(prompts), "--num-prompts", "3", "--out", str(out), *arguments])
        return status, json.loads(out.read_text().splitlines()[-1])["results"]

    return run


@pytest.mark.parametrize("backend", ["openai", "sglang"])
def test_every_protocol_gives_all_figures(tiny, measure, backend):
    flags = ["--output-len", str(LENGTH), "--ignore-eos", "--max-concurrency", "1"]
    status, results = measure(tiny, "--backend", backend, *flags)
    assert status == 0 and not any("the server counts" in note for note in results["notes"])
    assert results["summary"]["output_tokens"] == 3 * LENGTH
    later = results["latency_ms"]["inter_token_latency"]["count"]  # bytes of an unfinished character are held back
    assert 3 * LENGTH / 2 < later < 3 * LENGTH
    assert all(each["count"] >= 3 for each in results["latency_ms"].values())
    assert results["tokens_per_chunk"] * (3 + results["latency_ms"]["gap_between_chunks"]["count"]) == pytest.approx(3 * LENGTH)
    per_request, of_run = results["accept_length_per_request"], results["accept_length"]
    assert 1 <= per_request["min"] <= per_request["max"] <= 3 and 1 <= of_run["accept_length"] <= 3
    assert of_run["source"].startswith("/metrics")
    served = results["served"]
    assert (served["model"], served["server"]["tree"]) == ("tiny", "2/2/4") and served["server"]["version"]


def test_the_fake_engine_s_accept_length_is_found(measure):
    """Two tokens per verification after the first token: 1 + 2 + 2 + 2."""
    tokenizer = byte_tokenizer()
    model = ServedModel("fake", CONTEXT, TREE, tokenizer, ChatTemplate.of_model(tokenizer))
    with serving(FakeEngine(), model) as url:
        _, results = measure(url, "--output-len", "7")
    assert results["accept_length"]["accept_length"] == 2.0 and results["accept_length"]["drafts"] == 3 * 3
    assert results["accept_length_per_request"]["mean"] == 2.0
    assert results["tokens_per_chunk"] == 7 / 4


@pytest.mark.variants
def test_our_server_s_key_is_asked_for_and_taken(measure, monkeypatch):
    model = ServedModel("fake", CONTEXT, TREE, byte_tokenizer(), None)
    with serving(FakeEngine(), model, ServerSettings(api_key="right-key")) as url:
        with pytest.raises(BenchmarkError, match=r"status 401.*JAXSPEC_API_KEY"):
            measure(url)
        monkeypatch.setenv("JAXSPEC_API_KEY", "right-key")
        assert measure(url, "--output-len", "3")[0] == 0
