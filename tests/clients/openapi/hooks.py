"""Runs inside schemathesis: lets requests that generate text reach the engine, and keeps them short.

The schema can't say everything: a prompt must not be empty, either text or input_ids is needed, only tool calls make up for
content, stream_options need stream. Only what the schema allows is changed here, so that requests which are wrong by it stay
wrong.
"""

from typing import Any

import schemathesis

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
MOST = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "max_new_tokens": 2, "n": 2}
NOTHING: tuple[Any, ...] = (None, "", [], [[]])


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Changes a request right before it is sent."""
    body = case.body
    if case.path not in (COMPLETIONS, CHAT, GENERATE, RESPONSES, MESSAGES) or not isinstance(body, dict):
        return
    if case.meta.generation.mode.is_positive and case.path in (RESPONSES, MESSAGES):
        simplify(body)
    if isinstance(body.get("model"), str):
        del body["model"]
    if isinstance(body.get("stream_options"), dict) and body.get("stream") in (None, False):
        body["stream"] = True
    if case.path == GENERATE:
        reach_generate(body)
        shorten(body.setdefault("sampling_params", {}), "max_new_tokens")
        return
    if case.path != MESSAGES or "max_tokens" in body:  # which that endpoint demands
        shorten(body, "max_output_tokens" if case.path == RESPONSES else "max_tokens")
    if case.path == COMPLETIONS and "prompt" in body and body["prompt"] in NOTHING[1:]:
        body["prompt"] = "x"
    if case.path == CHAT and isinstance(body.get("messages"), list):
        for message in filter(lambda each: isinstance(each, dict), body["messages"]):
            if not message.get("tool_calls") and message.get("content") in NOTHING:
                message["content"] = "x"


def simplify(body: dict[str, Any]) -> None:
    """What items and blocks hold depends on their type, which the schema does not say; our model neither calls nor thinks."""
    if "input" in body and (isinstance(body["input"], list) or not body["input"]):
        body["input"] = "x"
    for message in body.get("messages") or ():
        if isinstance(message["content"], list) or not message["content"]:
            message["content"] = "x"
    for name in ("tools", "tool_choice", "thinking", "reasoning", "speculative", "regex", "ebnf"):
        body.pop(name, None)


def reach_generate(body: dict[str, Any]) -> None:
    text, ids = body.get("text"), body.get("input_ids")
    if ids in NOTHING:
        body.pop("input_ids", None)
        if text in NOTHING:
            body["text"] = "x"
    elif text in NOTHING:
        body.pop("text", None)
    wanted = ("logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
    if body.get("return_logprob") in (None, False) and any(body.get(name) is not None for name in wanted):
        body["return_logprob"] = True


def shorten(sampling: Any, budget: str) -> None:
    """The default of a chat reply is the whole context."""
    if not isinstance(sampling, dict):
        return
    for name, most in MOST.items():
        value = sampling.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and most < value < 1024:
            sampling[name] = most
    if sampling.get(budget) is None:
        sampling[budget] = MOST[budget]
