"""SamplingParams refuses what makes no sense, and says which field it was."""

import dataclasses
import math
import pickle
import re
import time

import numpy as np
import pytest

from jaxspec.decoding.settings import MAX_STOP_TOKENS
from jaxspec.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

NAN, INF = math.nan, math.inf
NOT_WHOLE, NOT_NUMBERS = ["4", 4.0, True, None, [4]], ["1", True, None, [1.0], NAN, INF, -INF]
BAD = {
    "max_tokens": [*NOT_WHOLE, 0, -1],
    "temperature": [*NOT_NUMBERS, -0.1, 100.1, 0.00005, 10**400],
    "top_k": [*NOT_WHOLE, -2],
    "top_p": [*NOT_NUMBERS, 0, 0.0, -0.1, 1.01],
    "min_p": [*NOT_NUMBERS, -0.1, 1.01],
    "repetition_penalty": [*NOT_NUMBERS, 0, -1, 10.1],
    "frequency_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "presence_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "logit_bias": [
        *(None, 3, "1", [[1, 2.0]], ((1,),), (1, 2)),
        *({"1": 1.0}, {1.0: 1.0}, {True: 1.0}, {-1: 1.0}),
        *({1: value} for value in (*NOT_NUMBERS, 100.1, -100.1)),
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0),
    ],
    "min_tokens": [*NOT_WHOLE, -1, 129],  # more than the default of max_tokens
    "bad_token_ids": [None, 3, "3", ["3"], [True], [1.0], [-1], {3}],
    "allowed_token_ids": [3, "3", ["3"], [True], [1.0], [-1], {3}, [], ()],
    "seed": ["1", 1.0, True, 2**64, -(2**63) - 1],
    "n": [*NOT_WHOLE, 0, -1, MAX_N + 1],
    "stop": [None, 3, [3], "", ["a", ""], "a" * (MAX_STOP_STRING_LENGTH + 1), ["a"] * (MAX_STOP_STRINGS + 1), {"a"}],
    "stop_token_ids": [None, 3, "3", ["3"], [True], [1.0], [-1], list(range(MAX_STOP_TOKEN_IDS + 1))],
    "ignore_eos": [1, 0, "true", None],
    "skip_special_tokens": [1, 0, "true", None],
    "include_stop_str_in_output": [1, 0, "true", None],
    "json_schema": [1, "", "[]", "x", [], {"minimum": INF}, {1: {1}}, int, "1" * 200_000],
    "regex": [1, ["a"], "a" * 200_000],
    "grammar": [1, ["a"], "a" * 200_000],
    "choice": [1, [], [""], [1], ["a"] * 1001],
    "structural_tag": [1, "x", "[1]"],
    "logprobs": ["4", 4.0, True, [4], -1, MAX_LOGPROBS + 1],
    "prompt_logprobs": ["4", 4.0, True, [4], -1, MAX_LOGPROBS + 1],
}
GOOD = {
    "max_tokens": [1, 10**9],
    "temperature": [0, 0.0, 0.0001, 1, 100],
    "top_k": [-1, 0, 1, 10**9],
    "top_p": [0.01, 1],
    "min_p": [0, 1],
    "repetition_penalty": [0.01, 10],
    "frequency_penalty": [-2, 0, 2],
    "presence_penalty": [-2, 0, 2],
    "logit_bias": [{}, (), {0: -100}, {5: 100.0, 7: 1}, ((5, 1.0),), dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)],
    "min_tokens": [0, 128],
    "bad_token_ids": [[], (), [0, 5]],
    "allowed_token_ids": [None, [0], (5, 6)],
    "seed": [None, 0, 2**64 - 1, -(2**63)],
    "n": [1, MAX_N],
    "stop": ["end", [], ["a", "b"], "a" * MAX_STOP_STRING_LENGTH, ("a",) * MAX_STOP_STRINGS],
    "stop_token_ids": [[], (), list(range(MAX_STOP_TOKEN_IDS))],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "include_stop_str_in_output": [True, False],
    "json_schema": [None, {}, "{}", {"type": "object"}],
    "regex": [None, "a*"],
    "grammar": [None, 'start: "a"'],
    "choice": [None, "a", ["a", "b"]],
    "structural_tag": [None, {"format": {"type": "any_text"}}, "{}"],
    "logprobs": [None, 0, MAX_LOGPROBS],
    "prompt_logprobs": [None, 0, MAX_LOGPROBS],
}


def test_what_holds_one_object_many_times_is_not_written_out():
    """The text would have 100 GB."""
    started = time.monotonic()
    with pytest.raises(ValueError, match="structural_tag has more than 131072 characters"):
        SamplingParams(structural_tag={"a": [["b" * 1000] * 1000] * 10**5})
    assert time.monotonic() - started < 1


def shown(value: object) -> str:
    return repr(value)[:20]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values], ids=shown)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(ValueError) as refusal:
        SamplingParams(**{field: value})
    message = str(refusal.value)
    assert message.startswith(f"{field} ") and len(message) < 250


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_tokens", "5", "got '5'"),
        ("temperature", 1e-6, "0 (greedy) or at least"),
        ("stop", ["a"] * 33, "up to 32 strings"),
        ("stop_token_ids", list(range(13)), "up to 12"),
    ],
    ids=shown,
)
def test_a_refusal_says_what_was_given_or_what_would_do(field, value, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in GOOD.items() for value in values], ids=shown)
def test_a_good_value_is_taken(field, value):
    SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "plain"),
    [
        ("max_tokens", np.int64(3), 3),
        ("top_k", np.int32(3), 3),
        ("temperature", np.float32(0.5), 0.5),
        ("top_p", np.float64(0.5), 0.5),
        ("min_p", np.int64(1), 1.0),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("stop_token_ids", [np.int32(5)], (5,)),
        ("logit_bias", {np.int64(5): np.float32(0.5)}, ((5, 0.5),)),
    ],
)
def test_numpys_numbers_are_taken_as_pythons(field, value, plain):
    taken = getattr(SamplingParams(**{field: value}), field)
    assert taken == plain and repr(taken).count("np.") <= (type(value) is np.float64)
    for wrong in (np.float32(3.5), np.bool_(True)):
        with pytest.raises(ValueError, match=r"^max_tokens must be a whole number"):
            SamplingParams(max_tokens=wrong)


def test_mappings_are_parameters_by_name():
    given = {"max_tokens": 3, "temperature": 0, "stop": ["a"]}
    assert SamplingParams.of(given) == SamplingParams(**given)
    assert SamplingParams.of(None) == SamplingParams.of({}) == SamplingParams()
    params = SamplingParams(n=2)
    assert SamplingParams.of(params) is params
    assert dataclasses.replace(pickle.loads(pickle.dumps(params)), n=1) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("temp", "did you mean temperature?"),
        ("max_new_tokens", "did you mean max_tokens?"),
        ("max_completion_tokens", "did you mean max_tokens?"),
        ("min_new_tokens", "did you mean min_tokens?"),
        ("sampling_seed", "did you mean seed?"),
        ("no_stop_trim", "did you mean include_stop_str_in_output?"),
        ("topk", "did you mean top_k?"),
        ("xyz", "it has max_tokens, temperature, "),
    ],
)
def test_an_unknown_name_gets_a_hint(name, said):
    with pytest.raises(TypeError, match=f"^SamplingParams has no {name}: {said.replace('?', '.')}"):
        SamplingParams(**{name: 1})
    with pytest.raises(ValueError, match=f"^SamplingParams has no {name}: {said.replace('?', '.')}"):
        SamplingParams.of({name: 1})


@pytest.mark.parametrize("value", ["max_tokens", 3, [("max_tokens", 3)]])
def test_what_holds_no_parameters_is_refused(value):
    with pytest.raises(ValueError, match=r"must be SamplingParams or a mapping such as .* got "):
        SamplingParams.of(value)


def test_every_field_is_in_the_tables():
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(BAD) == set(GOOD)


def test_stop_tokens_leave_room_for_the_models_own():
    assert MAX_STOP_TOKEN_IDS < MAX_STOP_TOKENS


def test_lists_and_mappings_become_tuples_so_that_parameters_compare_and_hash():
    lists = SamplingParams(stop="a", stop_token_ids=[1], bad_token_ids=[2], allowed_token_ids=[3, 4], logit_bias={5: 1})
    tuples = SamplingParams(stop=("a",), stop_token_ids=(1,), bad_token_ids=(2,), allowed_token_ids=(3, 4), logit_bias=((5, 1),))
    assert lists == tuples and hash(lists) == hash(tuples)
    assert (lists.stop, lists.stop_token_ids, lists.logit_bias) == (("a",), (1,), ((5, 1),))


def test_min_tokens_may_reach_max_tokens_and_not_further():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(ValueError, match=r"^min_tokens \(6\) must not be more than max_tokens \(5\)$"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_copies_count_seeds_up_if_there_is_one():
    params = SamplingParams(n=3, seed=7, temperature=0.5, stop="x", logit_bias={1: 2})
    one = dataclasses.replace(params, n=1)
    assert params.copies() == [dataclasses.replace(one, seed=seed) for seed in (7, 8, 9)] and one.copies() == [one]
    assert SamplingParams(n=2).copies() == [SamplingParams(), SamplingParams()]


def test_copies_share_what_was_checked(monkeypatch: pytest.MonkeyPatch):
    params = SamplingParams(n=3, allowed_token_ids=[1, 2])
    monkeypatch.delattr(SamplingParams, "__post_init__")
    assert all(each.allowed_token_ids is params.allowed_token_ids for each in params.copies())


@pytest.mark.parametrize("seed", [2**64 - 1, 2**64 - 2])
def test_copies_of_the_largest_seeds_are_valid_and_different(seed):
    seeds = [copy.seed % 2**64 for copy in SamplingParams(n=3, seed=seed).copies()]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("fields", "filters", "adjusts", "biases"),
    [
        ({}, False, False, False),
        ({"temperature": 0}, False, False, False),
        ({"top_k": 5}, True, False, False),
        ({"top_k": 0}, False, False, False),
        ({"top_p": 0.9}, True, False, False),
        ({"min_p": 0.1}, True, False, False),
        ({"min_p": 0.1, "top_p": 0.5, "top_k": 2, "temperature": 0}, False, False, False),
        ({"repetition_penalty": 1.1}, False, True, False),
        ({"repetition_penalty": 0.9, "temperature": 0}, False, True, False),
        ({"frequency_penalty": -0.1}, False, True, False),
        ({"presence_penalty": 0.1}, False, True, False),
        ({"min_tokens": 1}, False, True, False),
        ({"logit_bias": {1: 0.5}}, False, True, True),
        ({"bad_token_ids": [1]}, False, True, True),
        ({"allowed_token_ids": [1]}, False, True, True),
        ({"allowed_token_ids": [1], "top_k": 2}, True, True, True),
        ({"stop_token_ids": [1], "stop": "a", "logprobs": 5, "seed": 3}, False, False, False),
    ],
)
def test_what_a_request_needs(fields, filters, adjusts, biases):
    params = SamplingParams(**fields)
    assert (params.filters, params.adjusts, params.biases) == (filters, adjusts, biases)
