"""openai_checks.py URL: what openai-python, whatever its major, must get from the server. Prints one JSON object: every check's
name, and null or what went wrong. Runs where openai is installed."""

import asyncio
import json
import re
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
from openai_ways import CHAT, COMPLETIONS, KINDS, SYNC, SYNC_STREAM, WAYS, Client

PROMPT = "class Stack:\n    def __init__(self):"
GREEDY = {"temperature": 0, "max_tokens": 40}
MESSAGES = [{"role": "system", "content": "A stack."}, {"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
CHECKS: list[Callable[[Client], None]] = []


def check(function: Callable[[Client], None]) -> Callable[[Client], None]:
    CHECKS.append(function)
    return function


def subject(kind: str) -> dict[str, Any]:
    return {"prompt": PROMPT} if kind == COMPLETIONS else {"messages": MESSAGES}


@check
def models(client: Client) -> None:
    card = client.blocking.models.retrieve(client.model)
    assert (card.id, card.object, card.model_extra["max_model_len"]) == (client.model, "model", 1024), card
    listed = client.runner.run(client.asynchronous.models.retrieve(client.model))
    assert listed == card, listed


@check
def another_models_name_is_answered(client: Client) -> None:
    """The answer names the model that wrote it."""
    answer = client.blocking.completions.create(model="gpt-7", prompt=PROMPT, **GREEDY)
    assert answer.model == client.model and answer.choices[0].text, answer


@check
def all_ways_agree(client: Client) -> None:
    """Greedy, sampled with a seed, and ended by a stop string: text, ids, usage and acceptance, whole or as a stream."""
    for kind in KINDS:
        for options in (GREEDY, {"max_tokens": 40, "seed": 7}, {"max_tokens": 200, "temperature": 0, "stop": ["self.", "\n\n"]}):
            first, *others = [client.ask(way, kind, **subject(kind), **options) for way in WAYS]
            if "seed" in options:  # drafts of sampled texts get better with every answer, so only text, ids and usage must agree
                assert all(other.metrics for other in others), others
                others = [replace(other, metrics=first.metrics) for other in others]
            assert all(other == first for other in others), (kind, options, first, others)
            [text], [reason], [token_ids] = first.texts, first.reasons, first.token_ids
            prompt, completion, total = first.usage
            assert completion == len(token_ids) and total == prompt + completion, first
            assert not any(stop in text for stop in options.get("stop", ())), first
            assert reason == ("stop" if "stop" in options else "length"), first
            assert completion < 200 and (reason == "stop" or completion == 40), first
            assert first.metrics is not None and first.metrics["speculative_decoding"]["mean_acceptance_length"] >= 1, first


@check
def copies_have_seeds_of_their_own(client: Client) -> None:
    """Choice i of n has the seed + i, and the prompt counts once."""
    for way in WAYS:
        both = client.ask(way, COMPLETIONS, prompt=PROMPT, max_tokens=24, seed=3, n=2)
        single = [client.ask(SYNC, COMPLETIONS, prompt=PROMPT, max_tokens=24, seed=seed) for seed in (3, 4)]
        assert both.texts == [each.texts[0] for each in single] and both.texts[0] != both.texts[1], (way, both, single)
        assert both.token_ids == [each.token_ids[0] for each in single], (way, both, single)
        assert both.usage[:2] == (single[0].usage[0], 48), (way, both)
        chat = client.ask(way, CHAT, messages=MESSAGES, max_completion_tokens=8, seed=3, n=2)
        assert len(chat.texts) == 2 and chat.usage[1] == 16, (way, chat)


@check
def speculation_changes_no_text(client: Client) -> None:
    for kind in KINDS:
        for options in (GREEDY, {"max_tokens": 40, "seed": 11, "temperature": 0.8}):
            answers = {}
            for choice in ({"enabled": False}, {}, {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}):
                extra = {"speculative": choice} if choice else {}
                answers[len(choice)] = client.ask(SYNC_STREAM, kind, **subject(kind), **options, extra_body=extra)
            texts = {tuple(answer.texts) for answer in answers.values()}
            assert len(texts) == 1, (kind, options, texts)
            assert answers[1].metrics is None, "without speculation there is none to tell of"
            assert len(answers[3].metrics["speculative_decoding"]["acceptance_histogram"]) == 4, "levels 0 to 3 of the tree 3/1/4"


@check
def traces(client: Client) -> None:
    """What the page reads: every token once, with its origin."""
    extra = {"speculative": {"trace": True}, "return_token_ids": True}
    chunks = list(client.blocking.completions.create(model=client.model, prompt=PROMPT, stream=True, extra_body=extra, **GREEDY))
    tokens = [token for chunk in chunks for token in chunk.model_extra["speculative_trace"]["tokens"]]
    assert "".join(token["text"] for token in tokens) == "".join(chunk.choices[0].text for chunk in chunks)
    assert [token["id"] for token in tokens] == [token for chunk in chunks for token in chunk.choices[0].model_extra["token_ids"]]
    assert {"prefill", "draft", "bonus"} == {token["from"] for token in tokens}, tokens


@check
def logprobs_of_completions(client: Client) -> None:
    body = dict(model=client.model, prompt=PROMPT, logprobs=3, **GREEDY)
    [whole] = client.blocking.completions.create(**body).choices
    streamed = [chunk.choices[0].logprobs for chunk in client.blocking.completions.create(stream=True, **body)]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for each in streamed if each is not None for value in getattr(each, field)]
        assert joined == getattr(whole.logprobs, field), (field, joined, whole.logprobs)
    assert "".join(whole.logprobs.tokens) == whole.text
    assert len(whole.logprobs.tokens) == 40
    for own, top in zip(whole.logprobs.token_logprobs, whole.logprobs.top_logprobs, strict=True):
        assert own == max(top.values()) <= 0 and len(top) == 3, (own, top)  # greedy: the likeliest


@check
def logprobs_of_chat(client: Client) -> None:
    body = dict(model=client.model, messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    [whole] = client.blocking.chat.completions.create(**body).choices
    chunks = [chunk.choices[0] for chunk in client.blocking.chat.completions.create(stream=True, **body)]
    streamed = [token for choice in chunks if choice.logprobs is not None for token in choice.logprobs.content]
    assert streamed == whole.logprobs.content
    assert bytes(byte for token in streamed for byte in token.bytes).decode() == whole.message.content
    assert all(token.logprob == token.top_logprobs[0].logprob and len(token.top_logprobs) == 2 for token in streamed)
    plain = client.blocking.completions.create(model=client.model, prompt=PROMPT, logprobs=0, **GREEDY).choices[0].logprobs
    body["messages"] = [{"role": "user", "content": PROMPT}]  # the built-in template leaves it as it is
    [choice] = client.blocking.chat.completions.create(**body).choices
    chat = [token.logprob for token in choice.logprobs.content]
    assert max(abs(one - other) for one, other in zip(plain.token_logprobs, chat, strict=True)) < 1e-3, (plain, chat)


@check
def answers_can_be_sent_back(client: Client) -> None:
    """Also those of the helpers, which add what they have read of an answer."""
    body = dict(model=client.model, messages=MESSAGES, temperature=0, max_tokens=200, stop="self.")
    with client.blocking.chat.completions.stream(**body) as stream:
        helped = [stream.get_final_completion(), client.blocking.chat.completions.parse(**body)]
    for message in (each.choices[0].message for each in (client.blocking.chat.completions.create(**body), *helped)):
        for given in (message, message.to_dict(), message.model_dump()):
            client.blocking.chat.completions.create(**body | {"messages": [*MESSAGES, given, MESSAGES[-1]], "max_tokens": 1})


@check
def echo(client: Client) -> None:
    for way in WAYS:
        plain, echoed = (client.ask(way, COMPLETIONS, prompt=PROMPT, echo=value, **GREEDY) for value in (False, True))
        assert echoed.texts == [PROMPT + plain.texts[0]] and echoed.usage == plain.usage, (way, plain, echoed)
    body = dict(model=client.model, prompt=PROMPT, echo=True, logprobs=0)
    scored = client.blocking.completions.create(max_tokens=0, **body).choices[0]
    assert scored.text == PROMPT == "".join(scored.logprobs.tokens) and scored.logprobs.token_logprobs[0] is None


@check
def several_prompts(client: Client) -> None:
    """Text and token ids; choices come in the order of the prompts."""
    prompts = [PROMPT, "import os\n", "def main():\n"]
    body = dict(model=client.model, prompt=prompts, max_tokens=1, extra_body={"return_token_ids": True})
    ids = [choice.model_extra["prompt_token_ids"] for choice in client.blocking.completions.create(**body).choices]
    expected = [client.ask(SYNC, COMPLETIONS, prompt=prompt, **GREEDY) for prompt in prompts]
    for way in WAYS:
        for given in (prompts, ids):
            together = client.ask(way, COMPLETIONS, prompt=given, **GREEDY)
            assert together.texts == [each.texts[0] for each in expected], (way, together)
            assert together.usage == tuple(sum(numbers) for numbers in zip(*(each.usage for each in expected), strict=True))


@check
def refusals_have_their_classes(client: Client) -> None:
    cases = [
        (openai.BadRequestError, "temperature", "400", {"temperature": 5}),
        (openai.BadRequestError, "stop", "400", {"stop": [""]}),
        (openai.BadRequestError, "best_of", "400", {"best_of": 4}),
        (openai.BadRequestError, "max_tokens", "context_length_exceeded", {"max_tokens": 1024}),
        (openai.BadRequestError, "guided_regex", "400", {"extra_body": {"guided_regex": "(a"}}),
        (openai.BadRequestError, "speculative", "400", {"extra_body": {"speculative": {"num_steps": 99}}}),
    ]
    for kind, param, code, wrong in cases:
        for stream in (False, True):
            body = {"model": client.model, "prompt": PROMPT, "stream": stream} | wrong
            errors = [raised(client.blocking.completions.create, body)]
            errors.append(client.runner.run(raised_async(client.asynchronous.completions.create, body)))
            for error in errors:
                assert type(error) is kind, (wrong, error)
                assert (error.param, str(error.code), error.type) == (param, code, "invalid_request_error"), (wrong, error.body)
                assert param in error.message and error.request_id, (wrong, error)
    missing = raised(client.blocking.models.retrieve, {"model": "gpt-7"})
    assert type(missing) is openai.NotFoundError and missing.code == "model_not_found", missing
    empty = raised(client.blocking.chat.completions.create, {"model": client.model, "messages": []})
    assert type(empty) is openai.BadRequestError and empty.param == "messages", empty


def raised(create: Callable[..., Any], body: dict[str, Any]) -> openai.APIStatusError:
    try:
        create(**body)
    except openai.APIStatusError as error:
        return error
    raise AssertionError(f"nothing was raised for {body}")


async def raised_async(create: Callable[..., Any], body: dict[str, Any]) -> openai.APIStatusError:
    try:
        await create(**body)
    except openai.APIStatusError as error:
        return error
    raise AssertionError(f"nothing was raised for {body}")


@check
def requests_have_names(client: Client) -> None:
    headers = {"X-Request-Id": "my-name"}
    answer = client.blocking.completions.create(model=client.model, prompt=PROMPT, max_tokens=1, extra_headers=headers)
    assert answer._request_id == "my-name", answer._request_id


@check
def who_goes_away_is_dropped(client: Client) -> None:
    """A cancelled task, and a stream that is closed: nothing runs a moment later, and most tokens were never made."""
    body = {"model": client.model, "prompt": PROMPT, "max_tokens": 900, "stream": True, "extra_body": {"ignore_eos": True}}
    before = metrics(client.url)
    client.runner.run(cancelled(client, body))
    until(client.url, running=0)
    with client.blocking.completions.create(**body) as stream:
        next(iter(stream))
    until(client.url, running=0)
    client.runner.run(cancelled(client, body | {"stream": False}))
    until(client.url, running=0)
    after = metrics(client.url)
    aborted, made = (after[name] - before[name] for name in ('finished_requests_total "abort"', "generated_tokens_total"))
    assert aborted == 3 and made < 3 * 450, (aborted, made)


async def cancelled(client: Client, body: dict[str, Any]) -> None:
    """Goes away while the answer is made; if it is a stream, once some of it has come."""
    begun = asyncio.Event()

    async def read() -> None:
        answer = await client.asynchronous.completions.create(**body)
        async for _ in answer:
            begun.set()

    task = asyncio.create_task(read())
    await asyncio.to_thread(until, client.url, running=1)
    if body["stream"]:
        await asyncio.wait_for(begun.wait(), 60)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def metrics(url: str) -> dict[str, float]:
    """Our own numbers, by name and, for those by finish_reason, reason."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = re.findall(r'^jaxspec:(\w+)\{(?:.*finished_reason=("\w+"))?.*\} (\S+)$', response.read().decode(), re.MULTILINE)
    return {f"{name} {reason}".strip(): float(value) for name, reason, value in lines}


def until(url: str, running: int) -> None:
    """Waits until so many requests run."""
    deadline = time.monotonic() + 10
    while (now := metrics(url)["running_requests"]) != running:
        assert time.monotonic() < deadline, f"{now} requests run, {running} are expected"
        time.sleep(0.01)


def main() -> None:
    results: dict[str, str | None] = {}
    with Client(sys.argv[1]) as client:
        for function in CHECKS:
            try:
                function(client)
                results[function.__name__] = None
            except Exception:
                results[function.__name__] = traceback.format_exc()
    print(json.dumps({"version": openai.__version__, "checks": results}))


if __name__ == "__main__":
    main()
