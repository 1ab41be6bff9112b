"""The load generator's figures, arrivals, prompts and records, against values that were counted by hand."""

import json
import math
import shlex
from itertools import pairwise

import pytest

from benchmarks.options import BenchmarkError
from benchmarks.serving import datasets, main, metrics, options
from benchmarks.serving.answers import Answer, Chunk, Failure
from benchmarks.serving.arrivals import arrival_times
from benchmarks.serving.load import Run
from benchmarks.serving.privacy import public_command, recordable
from benchmarks.serving.server_stats import parse_metrics, since

LOCAL, REMOTE = "http://127.0.0.1:30000", "https://llm.example:8000"


def answer(sent: float, *chunks: tuple[float, int | None], tokens: int | None = None, **more) -> Answer:
    """Chunks as seconds after it was sent and tokens; it ended with the last of them."""
    made = [Chunk(sent + time, count) for time, count in chunks]
    return Answer(sent, sent + (chunks[-1][0] if chunks else 0), chunks=made, tokens=tokens, **more)


def test_times_of_one_answer():
    """4 tokens: one after 0.5 s, two at 0.7 s, one at 1.1 s."""
    one = answer(10.0, (0.5, 1), (0.7, 2), (1.1, 1), tokens=4)
    assert one.first_token_seconds == pytest.approx(0.5) and one.seconds == pytest.approx(1.1)
    assert one.seconds_per_token == pytest.approx(0.2)
    assert one.chunk_gaps == pytest.approx([0.2, 0.4])
    assert one.token_gaps == pytest.approx([0.1, 0.1, 0.4])


def test_what_is_unknown_is_not_guessed():
    uncounted = answer(0.0, (0.5, None), (0.7, None))
    assert uncounted.token_gaps is None and uncounted.seconds_per_token is None and uncounted.chunk_gaps == pytest.approx([0.2])
    assert answer(0.0, (0.5, 1), tokens=1).seconds_per_token is None
    whole = answer(0.0, (0.5, 3), tokens=3, is_stream=False)
    assert whole.first_token_seconds is None and whole.token_gaps is None


def test_distribution():
    found = metrics.distribution([4.0, 1.0, 3.0, 2.0], [0, 50, 90, 99.5])
    assert found == {
        "mean": 2.5, "median": 2.5, "std": pytest.approx(math.sqrt(1.25)), "min": 1.0, "max": 4.0, "count": 4,
        "percentiles": {"0": 1.0, "50": 2.5, "90": pytest.approx(3.7), "99.5": pytest.approx(3.985)},
    }  # fmt: skip
    assert metrics.distribution([], [50]) is None and metrics.distribution(None, [50]) is None


def test_a_summary_counts_right_answers_alone():
    """Two answers in 4 s, one of them within both limits, and one failure that began in between."""
    run = Run([
        answer(0.0, (0.1, 1), (0.3, 2), tokens=3, prompt_tokens=10, accept_length=2.0, accept_length_source="x"),
        answer(1.0, (0.5, 1), (3.0, 4), tokens=5, prompt_tokens=20, accept_length=3.0, accept_length_source="x"),
        answer(1.5, (0.1, 1), tokens=1, failure=Failure("broke")),
    ])  # fmt: skip
    found = metrics.summarize(run, [50], {"ttft": 200.0, "tpot": 100.0})
    summary = found["summary"]
    assert (summary["completed"], summary["failed"], summary["duration_seconds"]) == (2, 1, 4.0)
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (30, 8)
    assert (summary["requests_per_second"], summary["output_tokens_per_second"]) == (0.5, 2.0)
    assert (summary["total_tokens_per_second"], summary["good_requests_per_second"]) == (9.5, 0.25)
    assert summary["peak_concurrency"] == 2
    assert found["failed_requests"] == {"broke": 1} and found["tokens_per_chunk"] == 2.0
    assert (found["accept_length_per_request"]["mean"], found["accept_length_per_request"]["requests"]) == (2.5, 2)
    latency = found["latency_ms"]
    assert latency["time_to_first_token"]["mean"] == pytest.approx(300)
    assert latency["time_per_output_token"]["max"] == pytest.approx(625)
    assert latency["inter_token_latency"]["mean"] == pytest.approx((2 * 100 + 4 * 625) / 6)


@pytest.mark.parametrize(
    ("objectives", "good"), [({"ttft": 100.0}, 1), ({"tpot": 99.0}, 1), ({"e2el": 3000.0}, 3), ({"e2el": 1.0}, 0)]
)
def test_goodput_by_hand(objectives, good):
    """An answer of one token has no time per token, so it can't miss that limit."""
    done = [
        answer(0.0, (0.25, 1), (0.5, 2), tokens=3),  # 125 ms per token
        answer(0.0, (0.0625, 1), tokens=1),
        answer(0.0, (0.5, 1), (3.0, 5), tokens=6),
    ]
    assert metrics.count_good(done, objectives) == good
    done[0].tokens = None
    assert metrics.count_good(done, objectives) == (None if "tpot" in objectives else good)


def test_one_unknown_count_makes_the_sum_unknown():
    run = Run([answer(0.0, (0.1, 1), (0.2, 1), tokens=2), answer(0.0, (0.1, None), (0.3, None))])
    found = metrics.summarize(run, [50], {})
    assert found["summary"]["output_tokens_per_second"] is None and found["tokens_per_chunk"] is None
    assert found["latency_ms"]["inter_token_latency"] is None and found["latency_ms"]["gap_between_chunks"]["count"] == 2


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_spread(burstiness, spread):
    times = arrival_times(4001, 8.0, burstiness, seed=1)
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0 and min(gaps) >= 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 8)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation / mean == pytest.approx(spread, rel=0.08)


def test_arrivals_at_once_and_again_the_same():
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0] and arrival_times(1, 2.0, 1.0, 0) == [0.0]
    assert arrival_times(9, 2.0, 1.0, 5) == arrival_times(9, 2.0, 1.0, 5) != arrival_times(9, 2.0, 1.0, 6)


def test_counters_are_summed_over_engines_and_others_ignored():
    page = (
        "# HELP vllm:spec_decode_num_drafts_total x\n"
        'vllm:spec_decode_num_drafts_total{engine="0"} 3\nvllm:spec_decode_num_drafts_total{engine="1"} 4\n'
        'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9\n'
        "vllm:spec_decode_num_draft_tokens_total 21.0\nvllm:spec_decode_num_accepted_tokens_total 9\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2\n'
    )
    before = parse_metrics("")
    after = parse_metrics(page)
    assert before is None and after == (7, 21, 9, {1: 2})
    assert since(after, after) is None  # nothing was drafted
    assert since(after, after._replace(drafts=1)) is None  # another server
    assert since(after._replace(drafts=2, draft_tokens=6, accepted_tokens=4), after)["accept_length"] == 2.0


def wanted(name: str, path=None, **more) -> datasets.Wanted:
    fields = {
        "count": None, "extra": 2, "output_len": None, "input_len": 20, "range_ratio": 0.5, "context_len": None, "seed": 0,
        "shuffle": True, "tokenizer": None, "text_only": False,
    }  # fmt: skip
    return datasets.Wanted(name, path, **(fields | more))


def test_random_prompts_have_lengths_in_range_and_come_again():
    found = datasets.load(wanted("random", count=50), datasets.DEMO_MODEL)
    lengths = [len(request.prompt) for request in found.requests]
    assert min(lengths) >= 10 and max(lengths) <= 30 and len(set(lengths)) > 5 and len(found.extra) == 2
    assert {64 <= request.output_len <= 192 for request in found.requests} == {True}
    assert found == datasets.load(wanted("random", count=50), datasets.DEMO_MODEL)
    assert found != datasets.load(wanted("random", count=50, seed=1), datasets.DEMO_MODEL)
    assert isinstance(datasets.load(wanted("random", count=1, text_only=True), datasets.DEMO_MODEL).requests[0].prompt, str)
    with pytest.raises(BenchmarkError, match="give --tokenizer DIR"):
        datasets.load(wanted("random"), "another model")


def test_sharegpt_gives_prompts_and_lengths(tmp_path):
    path = tmp_path / "chats.json"
    long = "def area(self): return self.width * self.height\n"
    chats = [
        {"conversations": [{"from": "human", "value": long}, {"from": "gpt", "value": long * 2}, {"from": "human", "value": "x"}]},
        {"conversations": [{"from": "human", "value": long}]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": long}]},
        {"conversations": [{"from": "human", "value": long * 200}, {"from": "gpt", "value": long}]},
    ]
    path.write_text(json.dumps(chats))
    (request,) = datasets.load(wanted("sharegpt", path), datasets.DEMO_MODEL).requests
    assert request.prompt == long and 4 < request.output_len < len(long) * 2
    assert len(datasets.load(wanted("sharegpt", path, output_len=9), "another").requests) == 3
    with pytest.raises(BenchmarkError, match="or --sharegpt-output-len"):
        datasets.load(wanted("sharegpt", path), "another")
    path.write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"chats.json is not ShareGPT's"):
        datasets.load(wanted("sharegpt", path), "another")


def test_files_are_shuffled_by_the_seed_and_warm_up_prompts_are_others(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"prompt {number}", "more"]}) + "\n" for number in range(9)))
    first = datasets.load(wanted("mt-bench", path, count=6), "any")
    assert (
        first
        == datasets.load(wanted("mt-bench", path, count=6), "any")
        != datasets.load(wanted("mt-bench", path, count=6, seed=1), "any")
    )
    assert not set(first.requests) & set(first.extra) and first.prompts.describe()["source"] == "prompts.jsonl"
    everything = datasets.load(wanted("custom", path, shuffle=False), "any")
    assert [request.prompt for request in everything.requests] == [f"prompt {number}" for number in range(9)]
    assert everything.extra == everything.requests[:2]  # there are no others
    with pytest.raises(ValueError, match="9 usable prompts, 10 were asked for"):
        datasets.load(wanted("custom", path, count=10), "any")
    path.write_text('{"token_ids": [1, 2]}\n')
    with pytest.raises(ValueError, match="chat takes text"):
        datasets.load(wanted("custom", path, text_only=True), "any")


@pytest.mark.parametrize(
    ("arguments", "url", "kept"),
    [
        ("--api-key x --port 1", LOCAL, "--port 1"),
        ("--api-key=x --seed 1", LOCAL, "--seed 1"),
        ("--header A=b C=d --seed 1 --header=E=f", LOCAL, "--seed 1"),
        (f"--base-url {LOCAL} --seed 1", LOCAL, f"--base-url {LOCAL} --seed 1"),
        (f"--base-url {REMOTE} --seed 1", REMOTE, "--seed 1"),
        (f"--base-url={REMOTE} --goodput ttft:1 tpot:2", REMOTE, "--goodput ttft:1 tpot:2"),
        ("--host llm.example --port 1 --seed 1", REMOTE, "--seed 1"),
    ],
)
def test_commands_are_recorded_without_secrets_and_machines(arguments, url, kept):
    assert public_command(shlex.split(arguments), url) == kept


def test_flags_are_recorded_without_secrets_and_machines():
    for url in (LOCAL, REMOTE):
        parsed = options.parse(["--base-url", url, "--api-key", "hidden", "--header", "X-Key=hidden", "--port", "81"], "")
        recorded = recordable(parsed, url)
        assert "hidden" not in str(recorded) and parsed.api_key == "hidden"
        assert json.loads(json.dumps(vars(recorded), default=str, allow_nan=False))["request_rate"] == "inf"
        assert ("llm.example" in str(recorded), str(81) in str(recorded)) == (False, url == LOCAL)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--base-url", "127.0.0.1:30000"],
        ["--base-url", "http://me:hidden@127.0.0.1:1"],
        ["--base-url", "http://127.0.0.1:99999"],
        ["--header", "hidden"],
        ["--backend", "tgi"],
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--goodput", "itl:3"],
        ["--goodput", "ttft"],
        ["--goodput", "ttft:5", "--disable-stream"],
        ["--metric-percentiles", "50,101"],
        ["--extra-body", "[1]"],
        ["--dataset-name", "sharegpt"],
        ["--dataset-name", "random", "--dataset-path", "x"],
        ["--num-prompts", "0"],
    ],
)
def test_wrong_options_are_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    told = capsys.readouterr().err
    assert exit.value.code == 2 and told.count("\n") == 1 and "hidden" not in told


def test_the_other_tools_names_are_taken():
    names = [
        "--warmup-requests",
        "3",
        "--extra-request-body",
        '{"a": 1}',
        "--sharegpt-output-len",
        "7",
        "--backend",
        "sglang-oai-chat",
    ]
    parsed = options.parse([*names, "--base-url", f"{LOCAL}/v1/", "--request-rate", "inf"], "")
    assert (parsed.num_warmups, parsed.extra_body, parsed.output_len, parsed.backend) == (3, {"a": 1}, 7, "openai-chat")
    assert parsed.base_url == LOCAL and math.isinf(parsed.request_rate)
