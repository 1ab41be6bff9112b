"""Fields of requests that are made from the declarations of SamplingParams."""

import dataclasses

import pytest
from pydantic import ValidationError

from jaxspec.sampling_params import MAX_N, SamplingParams
from jaxspec.server.sampling_fields import OPENAI_NAMES, SGLANG_NAMES, OpenAISamplingFields, SglangSamplingFields

PARAMETERS = {field.name for field in dataclasses.fields(SamplingParams)}
NOT_IN_REQUESTS = {"bad_token_ids", "logprobs", "prompt_logprobs", "choice"}
"""No client has the first; each endpoint has its own names for the next two; the last is in vLLM's structured_outputs."""
ELSEWHERE = {"structural_tag"}
"""In OpenAI's requests these are in response_format and structured_outputs."""


def test_every_parameter_has_a_field_or_a_reason():
    assert set(OPENAI_NAMES) == PARAMETERS - NOT_IN_REQUESTS - ELSEWHERE - {"max_tokens"}  # whose meaning differs between endpoints
    assert set(SGLANG_NAMES) == PARAMETERS - NOT_IN_REQUESTS - {"allowed_token_ids"}
    assert SGLANG_NAMES["max_tokens"] == "max_new_tokens" and SGLANG_NAMES["include_stop_str_in_output"] == "no_stop_trim"


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", [1, MAX_N], [0, MAX_N + 1, 1.0, True, "1"]),
        ("top_k", [-1, 0, 5], [-2, 1.5, "5"]),
        ("top_p", [0.1, 1], [0, 1.1, float("nan"), "0.5", True]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("repetition_penalty", [0.1, 10], [0, 10.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("ignore_eos", [True, False], [1, "true"]),
        ("stop", ["a", ["a", "b"]], [1, ["a", 1]]),
        ("stop_token_ids", [[], [1]], [1, ["1"]]),
        ("logit_bias", [{}, {"5": -100}], [{"a": 1}, {"5": 101}, []]),
    ],
)
def test_fields_take_what_the_parameters_take(name, good, bad):
    for fields in (OpenAISamplingFields, SglangSamplingFields):
        for value in [None, *good]:
            taken = getattr(fields.model_validate({name: value}), name)
            if taken is not None:
                SamplingParams(**{name: taken})
        for value in bad:
            with pytest.raises(ValidationError):
                fields.model_validate({name: value})


def test_a_field_is_described_as_the_parameter_is():
    described = "No stop token (end of sequence included) can be drawn, and no stop string ends the text, before this many tokens."
    assert OpenAISamplingFields.model_fields["min_tokens"].description == described
    assert SglangSamplingFields.model_fields["min_new_tokens"].description == described
