"""The load client against a server that does what the test wants, and against ours: figures are right, and failures are told."""

import json
import sys
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

from benchmarks.serving import Answer, accept_length, main, parse, summarize, tables
from jaxspec.commands.common import run_guarded
from jaxspec.server.model import ServedModel
from jaxspec.server.settings import ServerSettings
from jaxspec.text.chat_template import ChatTemplate
from tests.benchmarks.stub import DONE, Stub, chunk, event, last
from tests.server.conftest import serving
from tests.server.fakes import CONTEXT, TREE, FakeEngine, byte_tokenizer

PROMPTS = 4
GAP = 0.06
"""Seconds that the timed script sleeps before the first token and between chunks."""


def fine(number):
    """Five tokens in three chunks; with a keep-alive."""
    yield b": keep-alive\n\n" + chunk("a")
    yield chunk("bc") + chunk("de")
    yield last(5) + DONE


def timed(number):
    for text in ("a", "bcd", "e"):
        time.sleep(GAP)
        yield chunk(text)
    yield last(5) + DONE


def broken(*parts: bytes | None):
    """Every second request after the first gets these parts, the others a right answer."""
    return lambda number: iter(parts) if number % 2 else fine(number)


@pytest.fixture
def measure(tmp_path, capsys):
    """Runs the command; returns its status, the record and what was printed."""

    def run(url: str, *arguments: str) -> SimpleNamespace:
        out, prompts = tmp_path / "out.jsonl", tmp_path / "prompts.txt"
        out.unlink(missing_ok=True)
        prompts.write_text("".join(f"prompt {number}\n" for number in range(PROMPTS)))
        status = run_guarded("bench", lambda: main(["--base-url", url, "--prompts", str(prompts), "--out", str(out), *arguments]))
        printed, record = capsys.readouterr(), json.loads(out.read_text()) if out.exists() else None
        return SimpleNamespace(status=status, record=record, results=record and record["results"], said=printed.out + printed.err)

    return run


def test_right_answers_are_counted_and_tables_come_from_the_record(measure):
    stub = Stub(fine)
    with stub.running() as url:
        run = measure(url, "--output-len", "5", "--ignore-eos")
    summary = run.results["summary"]
    assert (run.status, summary["completed"], summary["failed"], summary["output_tokens"]) == (0, PROMPTS, 0, 5 * PROMPTS)
    assert summary["output_tokens_per_second"] == pytest.approx(5 * PROMPTS / summary["duration_seconds"])
    assert run.results["latency_ms"]["gap_between_chunks"]["count"] == 2 * PROMPTS and run.results["accept_length"] is None
    body = stub.bodies[-1]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ("stub", 5, True, 0)
    assert len(stub.bodies) == PROMPTS + 1  # one to warm up
    assert all(text in run.said for text in tables(run.results).values())
    assert run.record["prompts"]["source"] == "prompts.txt" and url.rpartition(":")[2] in run.record["command"]


def test_times_are_those_of_the_server(measure):
    with Stub(timed).running() as url:
        run = measure(url, "--max-concurrency", "2")
    median = {name: each["median"] / 1000 for name, each in run.results["latency_ms"].items()}
    assert GAP <= median["time_to_first_token"] < 2 * GAP <= median["end_to_end_latency"] + 0.005
    assert GAP - 0.005 <= median["gap_between_chunks"] < 2 * GAP
    assert GAP / 2 - 0.005 <= median["time_per_output_token"] < GAP  # two gaps, four tokens after the first
    assert run.results["summary"]["duration_seconds"] >= 2 * 3 * GAP - 0.005


def test_figures_by_hand():
    """Four tokens: after 0.5, 0.7 and 1.1 s; one token; a failure."""
    answers = [Answer(10.0, [10.5, 10.7, 11.1], tokens=4), Answer(9.0, [9.1], tokens=1), Answer(0.0, failure="broke")]
    found = summarize(answers, 4.0)
    assert [found["summary"][name] for name in ("completed", "failed", "output_tokens", "requests_per_second")] == [2, 1, 5, 0.5]
    counts = {name: each["count"] for name, each in found["latency_ms"].items()}
    assert list(counts.values()) == [2, 1, 2, 2] and found["failed_requests"] == {"broke": 1}
    assert found["latency_ms"]["time_per_output_token"]["mean"] == pytest.approx(200)
    assert found["latency_ms"]["end_to_end_latency"]["percentiles"]["50"] == pytest.approx(600)
    answers[1].tokens = None
    assert summarize(answers, 4.0)["summary"]["output_tokens_per_second"] is None  # never guessed


def test_counters_of_the_server_give_the_accept_length():
    """Summed over two engines; what is no counter of drafts, or another server's, is left out."""
    page = (
        "# HELP vllm:spec_decode_num_drafts_total x\n"
        'vllm:spec_decode_num_drafts_total{{engine="0"}} {}\nvllm:spec_decode_num_drafts_total{{engine="1"}} 3\n'
        'vllm:spec_decode_num_drafts_created{{engine="0"}} 1.7e9\nvllm:spec_decode_num_draft_tokens_total 21.0\n'
        "vllm:spec_decode_num_accepted_tokens_total {}.0\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} 2\n'
    )
    readings = [page.format(*counts) for counts in ((100, 70), (140, 120))]
    found = accept_length(*readings)
    assert found is not None and (found["accept_length"], found["drafts"]) == (2.25, 40)
    assert all(accept_length(*pair) is None for pair in (("", ""), (readings[0], readings[0]), readings[::-1]))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([chunk("a", 1), chunk("b", 2)], "the stream ended before [DONE]"),
        ([chunk("a", 1), None], "ClientPayloadError: check --base-url"),
        ([chunk("a", 1), event('{"choices": ['), DONE], "malformed event (JSONDecodeError"),
        ([event({"object": "x"}), DONE], "malformed event (KeyError: 'choices')"),
        ([event("[]"), DONE], "malformed event (AttributeError"),
        ([chunk("a", 1), event({"error": {"message": "out of memory"}}), DONE], "the server reported an error"),
        ([event({"choices": [{"text": "a", "finish_reason": "abort"}]}), DONE], "gave up the request: abort"),
        ([last(0), DONE], "the answer is empty"),
    ],
)
def test_a_broken_answer_is_a_failed_request(measure, parts, reason):
    with Stub(broken(*parts)).running() as url:
        run = measure(url)
    summary, ((told, count),) = run.results["summary"], run.results["failed_requests"].items()
    assert (run.status, summary["completed"], summary["failed"], count) == (1, 2, 2, 2)
    assert reason in told and summary["output_tokens"] == 10  # of the right answers alone
    assert "failed: " in run.said and "Traceback" not in run.said


@pytest.mark.parametrize(
    ("answer", "message"),
    [((401, '{"error": {"message": "no key"}}'), "status 401: "), ((200, "<html>hello</html>"), "the stream ended before [DONE]")],
)
def test_what_the_first_request_meets_is_one_line(measure, answer, message):
    with Stub(fine, lambda _: answer).running() as url:
        run = measure(url)
    assert (run.status, run.record) == (2, None)
    assert run.said.startswith(f"bench: error: {url}: {message}") and "JAXSPEC_API_KEY" in run.said and run.said.count("\n") == 1


def test_a_wrong_address_is_one_line(measure):
    run = measure("http://127.0.0.1:9")
    assert run.status == 2 and "ClientConnectorError: check --base-url" in run.said and run.said.count("\n") == 1


def test_a_key_is_sent_and_never_recorded(measure, monkeypatch):
    monkeypatch.setenv("JAXSPEC_API_KEY", "key-secret")
    stub = Stub(fine, lambda number: (401, "key key-secret is wrong") if number == 2 else None)
    with stub.running() as url:
        run = measure(url)
    assert run.results["failed_requests"] == {"status 401: key (secret) is wrong": 1}
    assert "-secret" not in run.said + json.dumps(run.record)
    assert stub.headers[-1]["Authorization"] == "Bearer key-secret"


def test_the_second_question_follows_the_first_answer(measure):
    def script(number):
        for text in ("an", "swer"):
            yield event({"choices": [{"index": 0, "delta": {"content": text}}], "usage": None})
        yield last(2) + DONE

    stub = Stub(script)
    with stub.running() as url:
        run = measure(url, "--prompts", "mt-bench", "--num-prompts", "3", "--max-concurrency", "1")
    assert (run.status, run.results["summary"]["completed"], run.record["prompts"]["count"]) == (0, 6, 3)
    asked = [body["messages"] for body in stub.bodies]
    for first, second in list(pairwise(asked))[::2]:
        assert [message["role"] for message in second] == ["user", "assistant", "user"]
        assert second[:1] == first and second[1]["content"] == "answer"


def test_our_server_s_accept_length_is_found_and_its_key_taken(measure, monkeypatch):
    """The fake engine gives two tokens per verification after the first token: 1 + 2 + 2 + 2."""
    tokenizer = byte_tokenizer()
    model = ServedModel("fake", CONTEXT, TREE, tokenizer, ChatTemplate.of_model(tokenizer))
    with serving(FakeEngine(), model, ServerSettings(api_key="right-key")) as url:
        assert "status 401" in measure(url).said
        monkeypatch.setenv("JAXSPEC_API_KEY", "right-key")
        run = measure(url, "--output-len", "7")
    assert run.results["accept_length"]["accept_length"] == 2.0 and run.results["accept_length"]["drafts"] == 3 * PROMPTS
    assert run.results["served"]["server"]["tree"] == str(TREE) and run.results["summary"]["output_tokens"] == 7 * PROMPTS


def test_addresses_of_other_machines_are_not_recorded(measure, monkeypatch):
    async def measured(options, prompts):
        return {"summary": {"failed": 0}}

    monkeypatch.setattr("benchmarks.serving.measure", measured)
    monkeypatch.setattr("benchmarks.serving.tables", lambda results: {})
    assert "llm.example" not in json.dumps(measure("http://llm.example:8000").record)


@pytest.mark.parametrize("arguments", ["--base-url 127.0.0.1:30000", "--base-url http://me:hidden@127.0.0.1:1", "--num-prompts 0"])
def test_wrong_options_are_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments.split())
    told = capsys.readouterr().err
    assert exit.value.code == 2 and told.count("\n") == 1 and "hidden" not in told


def test_without_its_http_client_it_says_what_to_install(measure, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    run = measure("http://127.0.0.1:9")
    assert run.status == 2 and "pip install 'jaxspec-llm[bench]'" in run.said


def test_the_other_tools_names_are_taken():
    parsed = parse(["--dataset-path", "x.jsonl", "--output-len", "7", "--base-url", "http://127.0.0.1:30000/v1/"])
    assert (str(parsed.prompts), parsed.max_tokens, parsed.base_url) == ("x.jsonl", 7, "http://127.0.0.1:30000")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_counts_as_chunks_but_is_no_part_of_the_text(name):
    answer = Answer(0.0)
    for delta in ({"role": "assistant", "content": ""}, {name: "Hm"}, {"content": "Yes"}, {name: "", "content": None}):
        answer.take({"choices": [{"delta": delta}]})
    answer.take({"choices": [{"text": "."}]})
    assert len(answer.chunks) == 3 and answer.text == "Yes."
