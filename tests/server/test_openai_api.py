"""OpenAI's endpoints: what they answer, whole and streamed."""

import pytest

from jaxspec.sampling_params import MAX_N, SamplingParams
from jaxspec.server.model import ServedModel
from jaxspec.server.openai.api import model_card
from jaxspec.text.answer_parser import REASONING_FORMATS
from tests.server.conftest import BODIES, CHAT, COMPLETIONS, GENERATE, RESPONSES, USER, Client, asking, served
from tests.server.fakes import CHAT_TEMPLATE, CONTEXT, TEXT, TREE
from tests.server.test_bad_input import refusal
from tests.server.test_messages_api import THINKS

TEMPLATED = "user: hi\n"  # what the template makes of USER
BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
THREE = pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])


def usage(prompt: int, completion: int, cached: int = 0) -> dict:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def test_models(client: Client):
    listed = client.http.get("/v1/models").json()
    assert listed["object"] == "list"
    [card] = listed["data"]
    assert card == client.http.get("/v1/models/fake").json()
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", CONTEXT)


@pytest.mark.parametrize("server", ["client", "caller"])
def test_the_model_can_do_what_its_card_says(server: str, request: pytest.FixtureRequest):
    """The first writes no calls, and the second lets no request choose a tree."""
    http = request.getfixturevalue(server).http
    [card] = http.get("/v1/models").json()["data"]
    can, drafts = card["capabilities"], card["speculative"]

    def works(**more) -> bool:
        return http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 3, **more}).status_code == 200

    tool = {"type": "function", "function": {"name": "f"}}
    assert works() is can["chat"] is True
    assert works(tools=[tool]) is can["tools"] is can["reasoning"] is (server == "caller")
    assert works(regex="a") is bool(can["structured_output"])
    for shape, found in {**dict.fromkeys(drafts["trees"], True), "7/7/7": False}.items():
        numbers = dict(zip(("num_steps", "eagle_topk", "num_draft_tokens"), map(int, shape.split("/")), strict=True))
        assert works(speculative=numbers) is found
    assert drafts["tree"] == str(TREE) and drafts["algorithm"] == ("EAGLE3" if server == "client" else "NONE")


def test_a_model_without_a_tokenizer_takes_no_constraints():
    can = model_card(ServedModel("bare", CONTEXT, TREE, None), "bare").capabilities
    assert not (can.chat or can.tools or can.structured_output)


def test_embeddings_are_refused_by_name(client: Client):
    response = client.post("/v1/embeddings", input="hello", model="fake")
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (404, "invalid_request_error", 404)
    assert error["message"].startswith("embeddings are not served: ")
    assert client.post("/v1/embedding").json()["error"]["message"].startswith("unknown endpoint ")


def test_completion(client: Client):
    answer = client.post("/v1/completions", prompt="hello", max_tokens=9).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    assert answer["choices"] == [{"index": 0, "text": TEXT[:9], "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == usage(5, 9)


def test_what_a_request_leaves_out_is_the_model_s_own():
    own = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    with served(template=CHAT_TEMPLATE, sampling_defaults=own) as client:
        for path in (COMPLETIONS, CHAT):
            assert client.post(path, **BODIES[path], top_k=5, temperature=None).status_code == 200
            params = client.engine.params.pop()
            assert (params.temperature, params.top_k, params.repetition_penalty, params.top_p) == (0.6, 5, 1.1, 1.0)
        client.post("/generate", text="hello")  # as SGLang's
        assert client.engine.params.pop().temperature == 1.0


def test_completion_defaults_are_openais(client: Client):
    assert client.post("/v1/completions", prompt="hello").json()["usage"]["completion_tokens"] == 16
    assert client.engine.params == [SamplingParams(max_tokens=16, temperature=1.0)]


def test_a_default_budget_is_cut_to_the_context(client: Client):
    assert client.post("/v1/completions", prompt="x" * (CONTEXT - 3)).json()["usage"]["completion_tokens"] == 3


@THREE
def test_parameters_reach_the_engine(client: Client, path: str):
    fields = {"temperature": 0.5, "seed": 7, "stop": ["a", "b"], "stop_token_ids": [9], "ignore_eos": True}
    fields["skip_special_tokens"] = False
    assert client.post(path, **asking(path, 5, **fields)).status_code == 200
    assert client.engine.params == [SamplingParams(max_tokens=5, **fields)]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("top_p", [0.01, 0.5, 1, 1.0]),
        ("top_k", [-1, 0, 1, 2**31 - 1]),
        ("min_p", [0, 0.25, 1]),
        ("frequency_penalty", [-2, 0.5, 2]),
        ("presence_penalty", [-2, 0.5, 2]),
        ("repetition_penalty", [0.01, 1.1, 10]),
        ("min_tokens", [0, 1, 5]),
        ("seed", [0, -(2**63), 2**64 - 1]),
        ("ignore_eos", [True, False]),
        ("stop", ["a", ["a", "b"]]),
        ("stop_token_ids", [[], [1]]),
    ],
)
@THREE
def test_each_field_reaches_the_engine(client: Client, path: str, field: str, values: list):
    for value in values:
        assert client.post(path, **asking(path, 5, **{field: value})).status_code == 200, value
    assert client.engine.params == [SamplingParams(max_tokens=5, **{field: value}) for value in values]


@BOTH
def test_allowed_tokens_reach_the_engine(client: Client, path: str):
    for value in ([1], [1, 2, 3]):
        assert client.post(path, **asking(path, 5), allowed_token_ids=value).status_code == 200
        assert client.engine.params[-1] == SamplingParams(max_tokens=5, allowed_token_ids=value)


@THREE
def test_logit_bias_has_strings_as_keys(client: Client, path: str):
    for bias in ({}, {"7": -100, "0": 100.0, "255": 0.5}, {str(token): 1 for token in range(1024)}):
        assert client.post(path, **asking(path, 5, logit_bias=bias)).status_code == 200
        expected = tuple((int(token), float(value)) for token, value in bias.items())
        assert client.engine.params[-1] == SamplingParams(max_tokens=5, logit_bias=expected)


@pytest.mark.parametrize("path", BODIES)
def test_priority_reaches_the_engine(client: Client, path: str):
    for priority in (5, 0, -3, None):
        assert client.post(path, **BODIES[path], priority=priority).status_code == 200
    assert client.engine.priorities == [5, 0, -3, 0]


@pytest.mark.parametrize("path", BODIES)
def test_the_salt_reaches_the_engine(client: Client, path: str):
    for salt in ("tenant 1", None):
        assert client.post(path, **BODIES[path], cache_salt=salt).status_code == 200
    assert client.engine.salts == ["tenant 1", None]
    for salt in ("", 5, "x" * 100_000):
        answer = client.post(path, **BODIES[path], cache_salt=salt)
        assert answer.status_code == 400 and "cache_salt" in answer.json()["error"]["message"]


@BOTH
def test_n_completions(client: Client, path: str):
    answer = client.post(path, **BODIES[path], n=3, seed=7, max_tokens=4).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [params.seed for params in client.engine.params] == [7, 8, 9]
    assert {params.n for params in client.engine.params} == {1}
    tokens = len("hello") if path == COMPLETIONS else len(TEMPLATED)
    assert answer["usage"] == usage(tokens, 12)  # the prompt counts once
    assert "metrics" not in answer
    assert len(client.post(path, **BODIES[path], n=MAX_N, max_tokens=1).json()["choices"]) == MAX_N


def test_n_completions_of_several_prompts_are_in_order_of_the_prompts(client: Client):
    body = {"prompt": ["one", "three"], "n": 2, "seed": 1, "max_tokens": 4, "echo": True}
    answer = client.post("/v1/completions", **body).json()
    texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
    assert texts == {0: "oneThe ", 1: "oneThe ", 2: "threeThe ", 3: "threeThe "}
    assert [params.seed for params in client.engine.params] == [1, 2, 1, 2]
    assert answer["usage"] == usage(8, 16)
    *events, last = client.events("/v1/completions", **body, stream_options={"include_usage": True})
    streamed = dict.fromkeys(range(4), "")
    for event in events:
        [choice] = event["choices"]
        streamed[choice["index"]] += choice["text"]
    assert (streamed, last["usage"]) == (texts, answer["usage"])


def test_cached_tokens_count_once_per_prompt(client: Client):
    client.engine.cached_tokens = 2
    body = {"prompt": ["one", "three"], "n": 3, "max_tokens": 4}
    assert client.post("/v1/completions", **body).json()["usage"] == usage(8, 24, cached=4)
    last = client.events("/v1/completions", **body, stream_options={"include_usage": True})[-1]
    assert last["usage"] == usage(8, 24, cached=4)


def test_best_of_may_repeat_n(client: Client):
    assert len(client.post("/v1/completions", prompt="x", n=2, best_of=2).json()["choices"]) == 2


@pytest.mark.parametrize("prompt", ["hello", list(b"hello"), ["hello"], [list(b"hello")]])
def test_echo(client: Client, prompt):
    body = {"prompt": prompt, "max_tokens": 4, "echo": True}
    answer = client.post("/v1/completions", **body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hello" + TEXT[:4]]
    texts = [event["choices"][0]["text"] for event in client.events("/v1/completions", **body)]
    assert texts[0] == "helloT" and "".join(texts) == "hello" + TEXT[:4]


def test_echo_of_nonsense_is_refused_before_it_is_decoded(client: Client):
    for prompt in ([-1], [256], [2**31 - 1]):
        assert client.post("/v1/completions", prompt=prompt, echo=True).status_code == 400


@pytest.mark.parametrize("prompt", [["one", "three"], [[1, 2, 3], [4, 5, 6, 7, 8]]])
def test_several_prompts(client: Client, prompt):
    answer = client.post("/v1/completions", prompt=prompt, max_tokens=4).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["text"] for choice in answer["choices"]] == [TEXT[:4]] * 2
    assert answer["usage"] == usage(8, 8)
    assert "metrics" not in answer  # they are of one generation


@pytest.mark.parametrize(
    ("stop", "text", "tokens"), [("brown", "The quick ", 15), (["zzz", "föx"], "The quick brown ", 20), ("nowhere", TEXT[:29], 30)]
)
def test_stop_strings(client: Client, stop, text, tokens):
    answer = client.post("/v1/completions", prompt="hello", max_tokens=30, stop=stop).json()
    [choice] = answer["choices"]
    assert choice["text"] == text
    assert choice["finish_reason"] == ("length" if stop == "nowhere" else "stop")
    assert answer["usage"]["completion_tokens"] == tokens  # tokens count, the ö has two


def test_speculation_is_in_the_metrics(client: Client):
    answer = client.post("/v1/completions", prompt="hello", max_tokens=10).json()
    # One token from the prefill, four verifications of two, and one that the budget cut after its accepted draft.
    assert answer["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1.8,
        "draft_acceptance_rate": 0.25,
        "acceptance_histogram": [0, 5, 0, 0],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 20,
        "accepted_drafts_by_source": {"ngram": 5},
    }


@pytest.mark.parametrize("max_tokens", range(1, 40, 6))
def test_streaming_a_completion_equals_the_whole(client: Client, max_tokens: int):
    body = {"prompt": "hello", "max_tokens": max_tokens, "stop": "ö"}
    whole = client.post("/v1/completions", **body).json()
    *events, last = client.events("/v1/completions", stream_options={"include_usage": True}, **body)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + [whole["choices"][0]["finish_reason"]]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last.get("metrics") == whole.get("metrics")
    assert {event["id"] for event in events} == {last["id"]}
    assert all("�" not in event["choices"][0]["text"] for event in events)


def test_a_stream_has_no_usage_unless_asked(client: Client):
    events = client.events("/v1/completions", prompt="hello", max_tokens=5)
    assert all("usage" not in event and event["choices"] for event in events)


def test_chat(client: Client):
    answer = client.post("/v1/chat/completions", messages=USER, max_tokens=9).json()
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT[:9], "refusal": None}
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == usage(len(TEMPLATED), 9)


def test_a_chat_reply_may_fill_the_context(client: Client):
    assert client.post("/v1/chat/completions", messages=USER).json()["usage"]["total_tokens"] == CONTEXT


def test_log_probabilities_of_long_contexts_fit_unless_more_is_asked_for():
    with served(template=CHAT_TEMPLATE, context_length=2**18) as own:
        for path, field, logprobs in ((CHAT, "max_completion_tokens", {"logprobs": True}), (RESPONSES, "max_output_tokens", {})):
            body = BODIES[path] | logprobs | {"top_logprobs": 20, "stop": "quick"}
            assert own.post(path, **body).status_code == 200
            assert own.engine.params[-1].max_tokens == 2**21 // 21
            error = refusal(own.post(path, **body, **{field: 2**17}), 400)
            assert error["param"] == "top_logprobs" and f"lower it or {field}, or split the request" in error["message"]


def test_max_completion_tokens_wins(client: Client):
    answer = client.post("/v1/chat/completions", messages=USER, max_tokens=9, max_completion_tokens=4).json()
    assert answer["usage"]["completion_tokens"] == 4


def test_text_parts_are_joined_by_line_breaks(client: Client):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = client.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == len("user: a\nb\n")


def test_streaming_a_chat_equals_the_whole(client: Client):
    body = {"messages": USER, "max_tokens": 33}
    whole = client.post("/v1/chat/completions", **body).json()
    first, *events, end, last = client.events("/v1/chat/completions", stream_options={"include_usage": True}, **body)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == whole["choices"][0]["message"]["content"]
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "length")
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_a_reply_can_be_sent_back(client: Client):
    """openai-python sends the fields of a reply that it did not use as nulls and empty lists."""
    reply = {"role": "assistant", "content": "hello", "refusal": None, "annotations": [], "tool_calls": None, "audio": None}
    assert client.post("/v1/chat/completions", messages=[*USER, reply, *USER], max_tokens=1).status_code == 200


def test_without_effort_there_is_no_thinking(caller: Client):
    with served(template=THINKS, reasoning=REASONING_FORMATS["qwen3"]) as own:
        for fields, prompt in (
            ({"reasoning_effort": None}, "hi"),
            ({"reasoning_effort": "none"}, "hino"),
            ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "hi<think>"),
        ):
            assert own.post(CHAT, messages=USER, max_tokens=2, **fields).status_code == 200
            assert bytes(own.engine.prompts[-1]).decode() == prompt
        assert own.post(RESPONSES, input="hi", max_output_tokens=2, reasoning={"effort": "none"}).status_code == 200
        assert bytes(own.engine.prompts[-1]).decode() == "hino"
    error = refusal(caller.post(CHAT, messages=USER, reasoning_effort="none"), 400)
    assert error["param"] == "reasoning_effort" and "can't turn thinking off" in error["message"]
    assert refusal(caller.post(CHAT, messages=USER, reasoning_effort="low"), 400)["param"] == "reasoning_effort"


# Extensions by vLLM and SGLang

WITH_USAGE = {"include_usage": True, "continuous_usage_stats": True}


@BOTH
def test_continuous_usage_counts_what_was_streamed_so_far(client: Client, path: str):
    *chunks, last = client.events(path, **BODIES[path], max_tokens=9, stream_options=WITH_USAGE)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 1 and counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 9
    for usage in (chunk["usage"] for chunk in chunks):
        assert usage["total_tokens"] - usage["completion_tokens"] == last["usage"]["prompt_tokens"]


def test_continuous_usage_covers_all_choices(client: Client):
    *chunks, last = client.events(COMPLETIONS, prompt=["x", "yz"], n=2, max_tokens=4, stream_options=WITH_USAGE)
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
    assert last["usage"]["total_tokens"] == 19


def test_continuous_usage_does_not_need_the_last_chunk(client: Client):
    *_, last = client.events(COMPLETIONS, prompt="x", max_tokens=4, stream_options={"continuous_usage_stats": True})
    assert last["choices"] and last["usage"]["completion_tokens"] == 4


def test_the_prompt_alone(client: Client):
    answer = client.post(COMPLETIONS, prompt=["abc", "d"], echo=True, max_tokens=0, logprobs=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "d"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"] and logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [None, -0.98, -0.99] and logprobs["top_logprobs"][0] is None
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens"] == 4
    assert "metrics" not in answer


def test_the_prompt_alone_without_logprobs(client: Client):
    answer = client.post(COMPLETIONS, prompt="abc", echo=True, max_tokens=0).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == ("abc", None)
    refused = client.post(COMPLETIONS, prompt="a" * CONTEXT, echo=True, max_tokens=0).json()["error"]
    assert refused["message"] == f"prompt has {CONTEXT} tokens, but the context length is {CONTEXT}, output included"


@BOTH
def test_token_ids(client: Client, path: str):
    body = BODIES[path]
    expected = list(TEXT.encode()[:15])
    answer = client.post(path, **body, max_tokens=15, return_token_ids=True).json()
    [choice], prompt = answer["choices"], answer["choices"][0]["prompt_token_ids"]
    assert choice["token_ids"] == expected and prompt == list(b"hello" if path == COMPLETIONS else b"user: hi\n")
    chunks = client.events(path, **body, max_tokens=15, return_token_ids=True)
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == expected
    assert [chunk["choices"][0]["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk["choices"][0]] == [prompt]
    assert "token_ids" not in client.post(path, **body, max_tokens=5).json()["choices"][0]
    beside = [each.get("prompt_token_ids") for each in (answer, *chunks)]
    assert beside == [prompt if path == CHAT and number < 2 else None for number in range(len(beside))]


def test_token_ids_of_held_back_text(client: Client):
    """The stop string begins in token 5 and is not completed: chunks without text still carry their tokens."""
    chunks = client.events(COMPLETIONS, prompt="x", max_tokens=15, stop="quick brown bear", return_token_ids=True)
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == list(TEXT.encode()[:15])
    assert any(not chunk["choices"][0]["text"] and chunk["choices"][0]["token_ids"] for chunk in chunks)


@BOTH
@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_the_stop_string_may_stay(client: Client, path: str, name: str):
    def text(**more) -> str:
        [choice] = client.post(path, **BODIES[path], max_tokens=15, **more).json()["choices"]
        return choice["text"] if path == COMPLETIONS else choice["message"]["content"]

    assert text(stop="quick", **{name: True}) == "The quick" and text(stop="quick", **{name: False}) == "The "
    assert text(stop_token_ids=[ord("q")], **{name: True}) == "The q" and text(stop_token_ids=[ord("q")]) == "The "


def test_the_stop_string_may_stay_in_generate(client: Client):
    for stop, expected in (({"stop": "quick"}, "The quick"), ({"stop_token_ids": [ord("q")]}, "The q")):
        answer = client.post("/generate", text="x", sampling_params={**stop, "no_stop_trim": True}).json()
        assert answer["text"] == expected
