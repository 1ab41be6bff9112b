"""Fields of requests that are made from the declarations of SamplingParams. What they take: test_openai_api.py, wrong_fields.py."""

import dataclasses

from jaxspec.sampling_params import SamplingParams
from jaxspec.server.sampling_fields import OPENAI_NAMES, SGLANG_NAMES, OpenAISamplingFields, SglangSamplingFields, sampling_params

PARAMETERS = {field.name for field in dataclasses.fields(SamplingParams)}
NOT_IN_REQUESTS = {"bad_token_ids", "logprobs", "prompt_logprobs", "choice"}
"""No client has the first; each endpoint has its own names for the next two; the last is in vLLM's structured_outputs."""
ELSEWHERE = {"structural_tag"}
"""In OpenAI's requests these are in response_format and structured_outputs."""


def test_every_parameter_has_a_field_or_a_reason():
    assert set(OPENAI_NAMES) == PARAMETERS - NOT_IN_REQUESTS - ELSEWHERE - {"max_tokens"}  # whose meaning differs between endpoints
    assert set(SGLANG_NAMES) == PARAMETERS - NOT_IN_REQUESTS - {"allowed_token_ids"}
    assert SGLANG_NAMES["max_tokens"] == "max_new_tokens" and SGLANG_NAMES["include_stop_str_in_output"] == "no_stop_trim"


def test_tiny_temperatures_are_greedy():
    assert [sampling_params({}, temperature=each).temperature for each in (1e-9, 1e-4, 0, None)] == [0, 1e-4, 0, 1]


def test_a_field_is_described_as_the_parameter_is():
    described = "No stop token (end of sequence included) can be drawn, and no stop string ends the text, before this many tokens."
    assert OpenAISamplingFields.model_fields["min_tokens"].description == described
    assert SglangSamplingFields.model_fields["min_new_tokens"].description == described
