"""What a client may ask for about speculation, and what it gets to see."""

import itertools

import pytest

from jaxspec.engine.speculation import CycleCounts, Speculation
from jaxspec.server.speculation import acceptance_histogram, sglang_speculation, vllm_speculation
from tests.server.conftest import BODIES, CHAT, COMPLETIONS, GENERATE, Client, asking
from tests.server.fakes import TEXT, TREE

EVERYWHERE = pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
NUMBERS = {"num_steps": TREE.num_steps, "eagle_topk": TREE.topk, "num_draft_tokens": TREE.num_draft_tokens}


@EVERYWHERE
def test_a_request_may_turn_speculation_off(client: Client, path: str):
    answer = client.post(path, **asking(path, 9), speculative={"enabled": False}).json()
    if path == GENERATE:
        assert (answer["meta_info"]["spec_num_proposed_drafts"], answer["meta_info"]["spec_verify_ct"]) == (0, 4)
    else:
        assert "metrics" not in answer and answer["usage"]["completion_tokens"] == 9


@EVERYWHERE
@pytest.mark.parametrize("field", [None, {}, {"enabled": True}, NUMBERS, NUMBERS | {"enabled": True}, NUMBERS | {"head_steps": 3}])
def test_a_request_may_name_a_compiled_tree_or_leave_it_to_the_engine(client: Client, path: str, field: dict | None):
    answer = client.post(path, **asking(path, 9), speculative=field).json()
    drafted = 4 * (TREE.num_draft_tokens - 1)
    if path == GENERATE:
        assert answer["meta_info"]["spec_num_proposed_drafts"] == drafted
    else:
        assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == drafted


@EVERYWHERE
@pytest.mark.parametrize(
    ("field", "param", "message"),
    [
        ({"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 8}, "speculative", "5/4/8 is not compiled; this server has: 3/2/5"),
        (NUMBERS | {"head_steps": 1}, "speculative", "3/2/5/1 is not compiled"),
        (NUMBERS | {"head_steps": 4}, "speculative", "head_steps=4 must be at most num_steps=3"),
        ({"num_steps": 3}, "speculative", "give num_steps, topk and num_draft_tokens together"),
        ({"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 99}, "speculative", "must be between 2 and"),
        ({"enabled": False} | NUMBERS, "speculative", "not both"),
        ({"enabled": "no"}, "speculative.enabled", "boolean"),
        ({"steps": 3}, "speculative.steps", "is not a field"),
        ({"trace": True}, "speculative.trace", "needs stream"),
    ],
)
def test_what_is_refused(client: Client, path: str, field: dict, param: str, message: str):
    response = client.post(path, **BODIES[path], speculative=field)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and message in error["message"]


@EVERYWHERE
def test_a_trace_tells_of_every_token(client: Client, path: str):
    events = client.events(path, **asking(path, 30), speculative={"trace": True})
    traces = [event["speculative_trace"] for event in events if "speculative_trace" in event]
    tokens = [token for trace in traces for token in trace["tokens"]]
    expected = TEXT.encode()[:30]
    assert bytes(token["id"] for token in tokens) == expected
    assert "".join(token["text"] for token in tokens) == expected.decode()
    assert traces[0] == {"tokens": [{"id": ord("T"), "text": "T", "from": "prefill"}], "tree": None}
    for before, trace in itertools.pairwise(traces):
        first, *rest = trace["tokens"]
        assert (first["from"], first["depth"]) == ("draft", 1)
        assert all(token["from"] == "bonus" and "depth" not in token for token in rest)
        tree = trace["tree"]
        assert tree["shape"] == "3/2/5" and tree["parents"] == [-1, 0, 0] and tree["accepted"] == [0, 1]
        assert tree["sources"] == ["ngram", "head"]
        assert tree["tokens"][2] == "?" and bytes([first["id"]]).decode(errors="replace") == tree["tokens"][1]
        assert bytes([before["tokens"][-1]["id"]]).decode(errors="replace") == tree["tokens"][0]


@EVERYWHERE
def test_a_trace_tells_what_a_grammar_changed(client: Client, path: str):
    def trees(**fields) -> list[dict]:
        events = client.events(path, **asking(path, 9, **fields), speculative={"trace": True})
        return [tree for event in events if (tree := event.get("speculative_trace", {}).get("tree"))]

    assert [(tree["pruned"], tree["forced"]) for tree in trees(regex="a+")] == [(["{", "["], 1)] * 4
    assert all(not {"pruned", "forced"} & set(tree) for tree in trees())


def test_a_trace_of_plain_decoding_has_no_trees(client: Client):
    events = client.events(COMPLETIONS, **asking(COMPLETIONS, 5), speculative={"trace": True, "enabled": False})
    traces = [event["speculative_trace"] for event in events]
    assert {trace["tree"] for trace in traces} == {None}
    assert [token["from"] for trace in traces for token in trace["tokens"]] == ["prefill", "plain", "plain", "plain", "plain"]


@EVERYWHERE
def test_a_trace_changes_nothing_else(client: Client, path: str):
    def stripped(**more) -> list[dict]:
        events = client.events(path, **asking(path, 30), **more)
        for event in events:
            event.pop("speculative_trace", None)
            for name in ("id", "created"):
                event.pop(name, None)
            event.get("meta_info", {}).pop("id", None)
            event.get("meta_info", {}).pop("e2e_latency", None)
        empty = [{"index": 0, "text": "", "logprobs": None, "finish_reason": None}]
        held = [{"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": None}]
        return [event for event in events if event.get("choices") not in (empty, held)]

    assert stripped(speculative={"trace": True}) == stripped()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("extra", [{"n": 2}, {"stream": False}])
def test_a_trace_is_of_one_streamed_completion(client: Client, path: str, extra: dict):
    response = client.post(path, **{**BODIES[path], "stream": True, "speculative": {"trace": True}, **extra})
    assert response.status_code == 400 and response.json()["error"]["param"] == "speculative.trace"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_sglangs_details_come_on_request(client: Client, path: str):
    answer = client.post(path, **asking(path, 9), return_spec_tokens_details=True).json()
    details = answer["sglext"]["spec_tokens_details"]
    for counts in (details, answer["metrics"]["speculative_decoding"]):
        assert counts["accepted_drafts_by_source"] == {"ngram": 4}
    assert details["spec_verify_ct"] == 4 and details["spec_correct_drafts_histogram"] == [0, 4, 0, 0]
    assert "sglext" not in client.post(path, **asking(path, 9)).json()
    *_, last = client.events(path, **asking(path, 9), return_spec_tokens_details=True, stream_options={"include_usage": True})
    assert last["sglext"] == answer["sglext"] and last["metrics"] == answer["metrics"]


MIXED = Speculation((CycleCounts(4, 3, 7, 5), CycleCounts(1, 0, 0, 0), CycleCounts(2, 2, 3, 3), CycleCounts(1, 0, 7, 5)))
"""A wide tree, a plain cycle, a chain whose bonus a stop cut off, a wide tree in vain."""


def test_counts_of_mixed_cycles():
    assert acceptance_histogram(MIXED) == [1, 0, 1, 1, 0, 0]
    assert vllm_speculation(MIXED).model_dump(exclude_unset=True) == {
        "mean_acceptance_length": round(7 / 3, 4),
        "draft_acceptance_rate": round(5 / 17, 4),
        "acceptance_histogram": [1, 0, 1, 1, 0, 0],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 17,
    }
    details = sglang_speculation(MIXED)
    assert (details.spec_verify_ct, details.spec_accept_length) == (4, 2.0)
    histogram = details.spec_correct_drafts_histogram
    assert sum(place * count for place, count in enumerate(histogram)) == details.spec_num_correct_drafts == 5


def test_sources_are_told_where_there_are_several():
    merged = Speculation((CycleCounts(3, 2, 7, 5, ("head", "ngram")), CycleCounts(2, 1, 7, 5, ("ngram",)), CycleCounts(1, 0, 0, 0)))
    for made in (vllm_speculation, sglang_speculation):
        assert made(merged).model_dump(exclude_unset=True)["accepted_drafts_by_source"] == {"head": 1, "ngram": 2}
        assert "accepted_drafts_by_source" not in made(MIXED).model_fields_set


def test_counts_without_speculation():
    plain = Speculation((CycleCounts(1, 0, 0, 0),) * 3)
    assert vllm_speculation(plain) is None and acceptance_histogram(plain) == [0]
    assert sglang_speculation(plain).spec_accept_length == 1.0
    assert sglang_speculation(Speculation()).spec_accept_length == 0.0
