"""The load generator against a server that does what the test wants: figures are right, and failures are told, never hidden."""

import asyncio
import json
import os
import signal
import socket
import threading
import time

import pytest
from aiohttp import web

from benchmarks.client import Answer, Client, Request
from benchmarks.serving import main, tables
from jaxspec.commands.common import run_guarded
from tests.benchmarks.stub import DONE, Stub, chunk, event, in_thread, last

PROMPTS = 4
WAIT, GAP = 0.15, 0.06
"""Seconds that the timed script sleeps before the first token and between chunks."""


async def fine(stub, body):
    """Five tokens in three chunks, counted in each; with a keep-alive."""
    yield b": keep-alive\n\n" + chunk("a", 1)
    yield chunk("bc", 3) + chunk("de", 5)
    yield last(5, metrics={"speculative_decoding": {"mean_acceptance_length": 2.5}}) + DONE


async def timed(stub, body):
    await asyncio.sleep(WAIT)
    yield chunk("a", 1)
    for text, tokens in (("bcd", 4), ("e", 5)):
        await asyncio.sleep(GAP)
        yield chunk(text, tokens)
    yield last(5) + DONE


async def without_counts(stub, body):
    yield chunk("a")
    yield chunk("bc")
    yield DONE


async def counted_at_end(stub, body):
    yield chunk("a")
    yield chunk("bc")
    yield last(3) + DONE


def broken(first: bytes | None, *rest: bytes | None):
    """Every second request after the probe gets these parts, the others a right answer."""

    async def script(stub, body):
        if stub.number % 2 == 0:
            async for part in fine(stub, body):
                yield part
        else:
            for part in (first, *rest):
                yield part
                await asyncio.sleep(0)

    return script


@pytest.fixture
def measure(tmp_path, capsys):
    """Runs the command; returns its status, the record and what was printed."""

    def run(url: str, *arguments: str) -> tuple[int, dict | None, str]:
        out = tmp_path / "out.jsonl"
        out.unlink(missing_ok=True)
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("".join(f"prompt {number}\n" for number in range(9)))
        common = ["--base-url", url, "--prompts", str(prompts), "--num-prompts", str(PROMPTS), "--num-warmups", "0"]
        status = run_guarded("bench", lambda: main([*common, "--out", str(out), *arguments]))
        printed = capsys.readouterr()
        record = json.loads(out.read_text().splitlines()[-1]) if out.exists() else None
        return status, record, printed.out + printed.err

    return run


def test_a_right_answer_is_counted_and_tables_come_from_the_record(measure):
    stub = Stub(fine)
    with stub.running() as url:
        status, record, printed = measure(url, "--output-len", "5", "--ignore-eos")
    assert status == 0
    results = record["results"]
    summary = results["summary"]
    assert (summary["completed"], summary["failed"], summary["output_tokens"], summary["prompt_tokens"]) == (4, 0, 20, 28)
    assert summary["output_tokens_per_second"] == pytest.approx(20 / summary["duration_seconds"])
    assert summary["requests_per_second"] == pytest.approx(4 / summary["duration_seconds"])
    assert results["tokens_per_chunk"] == pytest.approx(5 / 3)
    assert results["latency_ms"]["inter_token_latency"]["count"] == PROMPTS * 4
    assert results["latency_ms"]["gap_between_chunks"]["count"] == PROMPTS * 2
    assert results["accept_length_per_request"]["mean"] == 2.5 and results["accept_length"] is None
    body = stub.bodies[-1]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ("stub", 5, True, 0)
    assert len({each["prompt"] for each in stub.bodies}) == PROMPTS + 1  # the probe has a prompt of its own
    assert all(text in printed for text in tables(results).values())
    assert record["prompts"]["source"] == "prompts.txt"


def test_times_are_those_of_the_server(measure):
    with Stub(timed).running() as url:
        _, record, _ = measure(url, "--max-concurrency", "2")
    latency = record["results"]["latency_ms"]

    def medians(*names: str) -> list[float]:
        return [latency[name]["median"] for name in names]

    first, per_token, whole = medians("time_to_first_token", "time_per_output_token", "end_to_end_latency")
    assert 1000 * WAIT <= first < 1000 * WAIT + 50
    assert 2 * 1000 * GAP / 4 - 3 <= per_token < 2 * 1000 * GAP / 4 + 12
    assert 1000 * (WAIT + 2 * GAP) - 3 <= whole < 1000 * (WAIT + 2 * GAP) + 90
    gap, token = medians("gap_between_chunks", "inter_token_latency")
    assert 1000 * GAP - 5 <= gap < 1000 * GAP + 40
    assert 1000 * GAP / 3 - 3 <= token < 1000 * GAP / 3 + 15  # three of the four tokens share a gap
    summary = record["results"]["summary"]
    assert summary["peak_concurrency"] == 2
    assert 2 * (WAIT + 2 * GAP) <= summary["duration_seconds"] < 2 * (WAIT + 2 * GAP) + 0.3


def test_goodput_counts_requests_within_the_limits(measure):
    async def slow_at_times(stub, body):
        await asyncio.sleep(0.4 if stub.number == 2 else 0)
        async for part in fine(stub, body):
            yield part

    with Stub(slow_at_times).running() as url:
        _, record, printed = measure(url, "--max-concurrency", "1", "--goodput", "ttft:200", "e2el:5000")
    summary = record["results"]["summary"]
    assert summary["good_requests_per_second"] == pytest.approx(3 / summary["duration_seconds"])
    assert "ttft <= 200 ms" in printed


@pytest.mark.parametrize(("refused", "fields"), [("continuous_usage_stats", {"include_usage": True}), ("include_usage", None)])
def test_refused_stream_options_are_left_out(measure, refused, fields):
    stub = Stub(counted_at_end if fields else without_counts)
    stub.refuse = lambda body: (
        web.json_response({"error": {"message": "unknown field"}}, status=400) if refused in str(body) else None
    )
    with stub.running() as url:
        status, record, printed = measure(url)
    assert status == 0 and stub.bodies[-1].get("stream_options") == fields
    latency, summary = record["results"]["latency_ms"], record["results"]["summary"]
    assert latency["inter_token_latency"] is None and latency["time_to_first_token"]["count"] == PROMPTS
    if fields:
        assert summary["output_tokens"] == 3 * PROMPTS and latency["time_per_output_token"]["count"] == PROMPTS
        assert "note: the server counts tokens only at the end" in printed
    else:
        assert summary["output_tokens_per_second"] is None and latency["time_per_output_token"] is None
        assert "note: the server counts no tokens" in printed and "unknown" in printed


def test_a_count_at_the_end_is_not_about_the_last_chunk(measure):
    async def script(stub, body):
        yield chunk("a")
        yield chunk("bc", 3) + DONE

    with Stub(script).running() as url:
        _, record, printed = measure(url)
    assert record["results"]["summary"]["output_tokens"] == 3 * PROMPTS
    assert record["results"]["latency_ms"]["inter_token_latency"] is None and "only at the end" in printed


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([chunk("a", 1), chunk("b", 2)], "the stream ended before [DONE]"),
        ([chunk("a", 1), None], "the connection was cut during the answer"),
        ([chunk("a", 1), event('{"choices": ['), DONE], "malformed event (not JSON): '{\"choices\": ['"),
        ([event({"object": "x"}), DONE], "malformed event (KeyError: 'choices')"),
        ([event("[]"), DONE], "malformed event (AttributeError"),
        ([chunk("a", 3), chunk("b", 2), DONE], "completion_tokens is '2' after 3"),
        ([event({"choices": [], "usage": {"completion_tokens": "x"}}), DONE], "completion_tokens is 'x' after None"),
        ([chunk("a", 1), event({"error": {"message": "out of memory"}}), DONE], "the server reported an error: out of memory"),
        ([event({"choices": [{"text": "a", "finish_reason": "abort"}]}), DONE], "gave up the request: finish_reason is abort"),
        ([last(0), DONE], "the answer is empty"),
        ([DONE], "the answer is empty"),
    ],
)
def test_a_broken_answer_is_a_failed_request(measure, parts, reason):
    with Stub(broken(*parts)).running() as url:
        status, record, printed = measure(url)
    assert status == 1
    results = record["results"]
    assert (results["summary"]["completed"], results["summary"]["failed"]) == (2, 2)
    ((told, count),) = results["failed_requests"].items()
    assert reason in told and count == 2
    assert "| failed requests" in printed and "Traceback" not in printed
    assert results["summary"]["output_tokens"] == 10  # of the right answers alone


def test_errors_of_the_server_are_failed_requests(measure):
    stub = Stub(fine)
    stub.refuse = lambda body: web.json_response({"error": {"message": "broke"}}, status=500) if stub.number % 2 else None
    with stub.running() as url:
        status, record, _ = measure(url)
    assert status == 1 and record["results"]["failed_requests"] == {"status 500: broke": 2}


def test_a_slow_answer_is_a_failed_request(measure):
    async def stuck(stub, body):
        yield chunk("a", 1)
        if stub.number == 0:
            yield last(1) + DONE
        else:
            await asyncio.sleep(2)

    with Stub(stuck).running() as url:
        status, record, _ = measure(url, "--request-timeout", "0.3")
    assert status == 1 and record["results"]["failed_requests"] == {"no complete answer within 0.3 s": 4}


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            lambda: web.json_response({"error": {"message": "no key"}}, status=401),
            "status 401: no key: give the server's key in JAXSPEC_API_KEY",
        ),
        (
            lambda: web.Response(text="<html>not here</html>", content_type="text/html", status=404),
            "status 404: a body that begins with",
        ),
        (lambda: web.Response(text="<html>hello</html>", content_type="text/html"), "the answer is text/html, expected"),
        (lambda: web.json_response({"detail": [{"msg": "bad"}]}, status=422), "status 422"),
        (lambda: web.Response(status=302, headers={"Location": "/"}), "status 302"),
    ],
)
def test_what_the_probe_meets_is_one_line(measure, response, message):
    stub = Stub(fine)
    stub.refuse = lambda body: response()
    with stub.running() as url:
        status, record, printed = measure(url)
    assert (status, record) == (2, None)
    assert message in printed and printed.startswith(f"bench: error: {url}: ") and printed.count("\n") == 1


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_wrong_address_is_one_line(measure):
    cases = {
        f"http://127.0.0.1:{free_port()}": "connection refused: start the server, or check --base-url",
        "http://host.invalid:1": "unknown host: check --base-url",
    }
    with Stub(fine).running() as url:
        cases[url.replace("http:", "https:")] = "no TLS connection: the server may speak plain HTTP"
        for wrong, message in cases.items():
            status, record, printed = measure(wrong)
            assert (status, record) == (2, None) and message in printed and printed.count("\n") == 1


@pytest.mark.parametrize("page", ["<html></html>", '{"data": []}', "[]"])
def test_a_list_of_models_that_is_none_is_one_line(measure, page):
    stub = Stub(fine)
    stub.pages["/v1/models"] = page
    with stub.running() as url:
        status, _, printed = measure(url)
    assert status == 2 and "/v1/models" in printed and printed.count("\n") == 1


def test_what_does_not_speak_http_is_one_line(measure):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(b"\x15\x03\x01\x00\x02\x02\x16")

        thread = threading.Thread(target=answer)
        thread.start()
        status, _, printed = measure(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(10)
    assert status == 2 and "closed the connection without an answer: check --base-url; it may need https://" in printed


def test_a_key_is_sent_and_never_recorded(measure, monkeypatch):
    monkeypatch.setenv("JAXSPEC_API_KEY", "key-secret")
    stub = Stub(fine)
    stub.refuse = lambda body: (
        web.json_response({"error": {"message": "key key-secret is wrong"}}, status=401) if stub.number == 2 else None
    )
    with stub.running() as url:
        _, record, printed = measure(url)
    assert record["results"]["failed_requests"] == {"status 401: key (secret) is wrong": 1}
    assert "-secret" not in printed + json.dumps(record)
    assert url.rpartition(":")[2] in record["command"]
    assert stub.headers[-1]["Authorization"] == "Bearer key-secret"


def test_counters_of_the_server_give_the_accept_length_of_the_run(measure):
    """40 drafts of three tokens in the run, 50 accepted: 1 + 50 / 40."""
    pages = [(100, 300, 70, 60), (140, 420, 120, 90)]
    form = (
        'vllm:spec_decode_num_drafts_total{{engine="0"}} {}\nvllm:spec_decode_num_draft_tokens_total{{engine="0"}} {}.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {}\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {}\n'
    )

    class Counting(Stub):
        async def answer(self, request):
            self.pages["/metrics"] = form.format(*pages[len(self.bodies) > 1])
            return await super().answer(request)

    with Counting(fine).running() as url:
        _, record, printed = measure(url)
    found = record["results"]["accept_length"]
    assert (found["accept_length"], found["drafts"]) == (2.25, 40)
    assert found["acceptance_rate_per_position"] == [0.75] and "/metrics" in found["source"]
    assert "accept length, whole run" in printed and "2.25" in printed


def test_the_second_question_follows_the_first_answer(measure):
    async def script(stub, body):
        for text in ("an", "swer"):
            yield event({"choices": [{"index": 0, "delta": {"content": text}}], "usage": None})
        yield last(2) + DONE

    stub = Stub(script)
    with stub.running() as url:
        status, record, _ = measure(url, "--prompts", "mt-bench", "--num-prompts", "3", "--max-concurrency", "1")
        summary = record["results"]["summary"]
        assert (status, summary["completed"], summary["output_tokens"], record["prompts"]["count"]) == (0, 6, 12, 3)
        assert measure(url, "--prompts", "mt-bench", "--backend", "sglang")[0] == 2
    _, first, second, *others = (body["messages"] for body in stub.bodies)
    assert [message["role"] for message in second] == ["user", "assistant", "user"] and len(others) == 4
    assert second[:1] == first and second[1]["content"] == "answer"


def test_sglang_s_protocol_and_average(measure):
    async def script(stub, body):
        for text, tokens in (("a", 1), ("abc", 3), ("abc", 3)):
            yield event({"text": text, "meta_info": {"completion_tokens": tokens, "prompt_tokens": 7, "spec_accept_length": 1.5}})
        yield DONE

    stub = Stub(script)
    secret = {"api_key": "server-key", "model_path": "/somewhere/model", "version": "1.2", "tree": "3/1/4"}
    stub.pages["/server_info"] = json.dumps(secret | {"internal_states": [{"avg_spec_accept_length": 1.75}]})
    with stub.running() as url:
        _, record, _ = measure(url, "--backend", "sglang", "--output-len", "3")
    assert stub.bodies[-1]["sampling_params"] == {"max_new_tokens": 3, "temperature": 0.0}
    results = record["results"]
    assert results["latency_ms"]["inter_token_latency"]["count"] == 2 * PROMPTS
    assert results["accept_length"]["accept_length"] == 1.75 and "not this run alone" in results["accept_length"]["source"]
    assert results["accept_length_per_request"]["mean"] == 1.5
    assert results["served"]["server"] == {"version": "1.2", "tree": "3/1/4"}


def test_cumulative_text_is_not_repeated():
    async def script(stub, body):
        for text in ("a", "abc"):
            yield event({"text": text, "meta_info": {"completion_tokens": len(text), "finish_reason": {"type": "stop"}}})
        yield DONE

    async def ask(url: str) -> Answer:
        async with Client(url, "sglang") as client:
            return await client.complete(Request("x", 3))

    with Stub(script).running() as url:
        answer = asyncio.run(ask(url))
    assert (answer.text, answer.tokens, answer.failure) == ("abc", 3, None)


def test_an_open_loop_does_not_wait_for_the_server(measure):
    with Stub(timed).running() as url:  # 0.27 s each, so 4 in turn would take more than a second
        _, record, _ = measure(url, "--request-rate", "20")
    last_due = (PROMPTS - 1) / 20
    assert last_due + WAIT + 2 * GAP - 0.01 <= record["results"]["summary"]["duration_seconds"] < 0.9
    assert record["flags"]["request_rate"] == "20.0"


def test_a_client_that_falls_behind_says_so(measure, monkeypatch):
    complete = Client.complete

    async def slow(self, request):
        time.sleep(0.12)
        return await complete(self, request)

    monkeypatch.setattr(Client, "complete", slow)
    with Stub(fine).running() as url:
        _, _, printed = measure(url, "--request-rate", "50")
    assert "note: this client fell behind its schedule" in printed and "paused for up to" in printed


def test_ctrl_c_ends_with_130_and_records_nothing(measure):
    interrupted = threading.Event()

    async def stuck(stub, body):
        """The probe is answered; no other request is before the server goes away."""
        if stub.number:
            if not interrupted.is_set():
                interrupted.set()
                os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        async for part in fine(stub, body):
            yield part

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a script ignores it
    try:
        with Stub(stuck).running() as url:
            status, record, printed = measure(url)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (status, record) == (130, None) and "interrupted" in printed and "Traceback" not in printed


def test_a_server_that_hangs_up_between_requests_is_told(measure):
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"data": [{"id": "x"}]})
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    with in_thread(handler) as url:
        status, _, printed = measure(url)
    assert status == 2 and "closed the connection without an answer" in printed
