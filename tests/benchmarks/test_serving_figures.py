"""The serving benchmark's figures, arrivals and options, against values counted by hand."""

import argparse
import json
import math
from itertools import pairwise

import pytest

from benchmarks.client import Answer, Chunk, FailedRequest
from benchmarks.serving import accept_length_between, arrival_times, main, parse, parse_counters, recordable
from benchmarks.serving_figures import Run, distribution, is_good, summarize

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


def test_distribution():
    found = distribution([0.004, 0.001, 0.003, 0.002])
    assert found == {
        "mean": 2.5, "median": 2.5, "count": 4, "percentiles": {"50": 2.5, "90": pytest.approx(3.7), "99": pytest.approx(3.97)},
    }  # fmt: skip
    assert distribution([]) is None and distribution(None) is None


def test_a_summary_counts_right_answers_alone():
    """Two answers in 4 s, one of them within both limits, and one failure that began in between."""
    run = Run([
        answer(0.0, (0.1, 1), (0.3, 2), tokens=3, prompt_tokens=10, accept_length=2.0),
        answer(1.0, (0.5, 1), (3.0, 4), tokens=5, prompt_tokens=20, accept_length=3.0),
        answer(1.5, (0.1, 1), tokens=1, failure=FailedRequest("broke")),
    ])  # fmt: skip
    found = summarize(run, {"ttft": 200.0, "tpot": 100.0})
    summary = found["summary"]
    assert (summary["completed"], summary["failed"], summary["duration_seconds"]) == (2, 1, 4.0)
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (30, 8)
    assert (summary["requests_per_second"], summary["output_tokens_per_second"]) == (0.5, 2.0)
    assert summary["good_requests_per_second"] == 0.25
    assert summary["peak_concurrency"] == 2
    assert found["failed_requests"] == {"broke": 1} and found["tokens_per_chunk"] == 2.0
    assert found["accept_length_per_request"] == {"mean": 2.5, "min": 2.0, "max": 3.0}
    latency = found["latency_ms"]
    assert latency["time_to_first_token"]["mean"] == pytest.approx(300)
    assert latency["time_per_output_token"]["mean"] == pytest.approx((100 + 625) / 2)
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
    assert sum(is_good(each, objectives) for each in done) == good
    done[0].tokens = None
    found = summarize(Run(done), objectives)["summary"]["good_requests_per_second"]
    assert found is None if "tpot" in objectives else found == good / 3


def test_one_unknown_count_makes_the_sum_unknown():
    run = Run([answer(0.0, (0.1, 1), (0.2, 1), tokens=2), answer(0.0, (0.1, None), (0.3, None))])
    found = summarize(run, {})
    assert found["summary"]["output_tokens_per_second"] is None and found["tokens_per_chunk"] is None
    assert found["latency_ms"]["inter_token_latency"] is None and found["latency_ms"]["gap_between_chunks"]["count"] == 2


def test_arrivals_have_the_rate_and_the_spread_of_a_poisson_process():
    times = arrival_times(4001, 8.0, seed=1)
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0 and min(gaps) >= 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 8)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation / mean == pytest.approx(1.0, rel=0.08)


def test_arrivals_at_once_and_again_the_same():
    assert arrival_times(3, math.inf, 0) == [0.0, 0.0, 0.0] and arrival_times(1, 2.0, 0) == [0.0]
    assert arrival_times(9, 2.0, 5) == arrival_times(9, 2.0, 5) != arrival_times(9, 2.0, 6)


def test_counters_are_summed_over_engines_and_others_ignored():
    page = (
        "# HELP vllm:spec_decode_num_drafts_total x\n"
        'vllm:spec_decode_num_drafts_total{engine="0"} 3\nvllm:spec_decode_num_drafts_total{engine="1"} 4\n'
        'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9\n'
        "vllm:spec_decode_num_draft_tokens_total 21.0\nvllm:spec_decode_num_accepted_tokens_total 9\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2\n'
    )
    after = parse_counters(page)
    assert parse_counters("") == {} and after == {"drafts": 7, "draft_tokens": 21, "accepted_tokens": 9, "1": 2}
    assert accept_length_between(after, after) is None  # nothing was drafted
    assert accept_length_between(after, after | {"drafts": 1.0}) is None  # another server
    found = accept_length_between(after | {"drafts": 2.0, "accepted_tokens": 4.0}, after)
    assert found is not None and found["accept_length"] == 2.0


@pytest.mark.parametrize("url", [LOCAL, REMOTE])
@pytest.mark.parametrize("form", ["--base-url {}", "--base-url={}", "--base_url {}"])
def test_addresses_of_other_machines_are_not_recorded(url, form):
    recorded = recordable(parse([*form.format(url).split(), "--max-tokens", "9"]))
    assert isinstance(recorded, argparse.Namespace) and recorded.command.endswith("--max-tokens 9")
    assert ("llm.example" in str(recorded), LOCAL in str(recorded)) == (False, url == LOCAL)
    assert json.loads(json.dumps(vars(recorded), default=str, allow_nan=False))["request_rate"] == "inf"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--base-url", "127.0.0.1:30000"],
        ["--base-url", "http://me:hidden@127.0.0.1:1"],
        ["--base-url", "http://127.0.0.1:99999"],
        ["--backend", "tgi"],
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--goodput", "itl:3"],
        ["--goodput", "ttft"],
        ["--num-prompts", "0"],
    ],
)
def test_wrong_options_are_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    told = capsys.readouterr().err
    assert exit.value.code == 2 and told.count("\n") == 1 and "hidden" not in told


def test_the_other_tools_names_are_taken():
    parsed = parse(["--dataset-path", "x.jsonl", "--output-len", "7", "--base-url", f"{LOCAL}/v1/", "--request-rate", "inf"])
    assert (str(parsed.prompts), parsed.max_tokens, parsed.base_url) == ("x.jsonl", 7, LOCAL) and math.isinf(parsed.request_rate)
