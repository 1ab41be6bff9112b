"""The tokenizer over HTTP, as lm-eval, vLLM's benchmark and SGLang's clients use it. What it refuses: wrong_fields.py."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from jaxspec.server import tokenize_api
from jaxspec.server.settings import ServerSettings
from tests.server.conftest import USER, Client, served
from tests.server.fakes import CONTEXT, byte_tokenizer
from tests.server.test_bad_input import refusal

TEXT = "föx 🦊"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_there_and_back(client: Client, path: str):
    answer = client.post(path, prompt=TEXT).json()
    ids = list(TEXT.encode())
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT, "token_strs": None}
    assert client.post(path.replace("token", "detoken"), tokens=ids).json() == {"prompt": TEXT, "text": TEXT}


def test_lists_get_lists(client: Client):
    answer = client.post("/tokenize", prompt=["ab", "", TEXT], model="fake").json()
    assert answer["tokens"] == [[97, 98], [], list(TEXT.encode())]
    assert answer["count"] == [2, 0, len(TEXT.encode())]
    assert client.post("/detokenize", tokens=answer["tokens"]).json()["text"] == ["ab", "", TEXT]
    assert client.post("/detokenize", tokens=[]).json() == {"prompt": "", "text": ""}


def test_tokens_as_the_vocabulary_has_them(client: Client):
    assert client.post("/tokenize", prompt="a b", return_token_strs=True).json()["token_strs"] == ["a", "Ġ", "b"]
    assert client.post("/tokenize", prompt=["a", "b"], return_token_strs=True).json()["token_strs"] == [["a"], ["b"]]


def test_messages_are_what_chat_completions_make_of_them(client: Client):
    answer = client.post("/tokenize", messages=USER).json()
    assert client.post("/detokenize", tokens=answer["tokens"]).json()["text"] == "user: hi\n"
    chat = client.post("/v1/chat/completions", messages=USER, max_tokens=1).json()
    assert chat["usage"]["prompt_tokens"] == answer["count"]


def test_texts_may_be_longer_than_the_context(client: Client):
    """lm-eval cuts long documents itself."""
    assert client.post("/tokenize", prompt="x" * 5000).json()["count"] == 5000


@pytest.fixture(scope="module")
def special():
    """A server whose tokenizer begins every prompt with <s> and whose special tokens are 300 and 301."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    bos = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.name_or_path = "/home/someone/models/secret"
    with served(tokenizer=tokenizer) as client:
        yield client.http


def test_special_tokens(special: httpx.Client):
    tokenize = lambda **body: special.post("/tokenize", json=body).json()["tokens"]  # noqa: E731
    assert tokenize(prompt="a") == tokenize(prompt="a", add_special_tokens=True) == [256, 97]
    assert tokenize(prompt="a", add_special_tokens=False) == [97]
    assert 256 not in tokenize(messages=USER)
    detokenize = lambda **body: special.post("/detokenize", json=body).json()["prompt"]  # noqa: E731
    assert detokenize(tokens=[256, 97, 257]) == "<s>a</s>"
    assert detokenize(tokens=[256, 97, 257], skip_special_tokens=True) == "a"


def test_tokenizer_info_is_what_lm_eval_needs(special: httpx.Client):
    """Its RemoteTokenizer encodes eos_token to learn its id, and decodes that to get a stop string."""
    answer = special.get("/tokenizer_info")
    info = answer.json()
    assert "/home" not in answer.text
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == ("</s>", "<s>", None)
    assert info["chat_template"].startswith("{% for message in messages %}")
    assert (info["vocab_size"], info["model_max_length"]) == (258, CONTEXT)
    ids = special.post("/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False}).json()["tokens"]
    assert ids == [257] and special.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "</s>"


def test_tokenizer_info_can_be_turned_off():
    with served(ServerSettings(tokenizer_info=False)) as client:
        assert refusal(client.http.get("/tokenizer_info"), 404)
        assert client.post("/tokenize", prompt="x").status_code == 200
        assert "/tokenizer_info" not in client.http.get("/openapi.json").json()["paths"]


def test_a_model_without_a_tokenizer():
    with served(tokenizer=None) as client:
        for answer in (
            client.post("/tokenize", prompt="x"),
            client.post("/detokenize", tokens=[1]),
            client.http.get("/tokenizer_info"),
        ):
            assert "no tokenizer" in refusal(answer, 404)["message"]


def test_long_texts_are_refused(client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenize_api, "MAX_DETOKENIZED", 5)
    assert client.post("/detokenize", tokens=[[97, 98], [99] * 3]).status_code == 200
    error = refusal(client.post("/detokenize", tokens=[[97, 98], [99] * 4]), 400)
    assert error["param"] == "tokens" and "more than 5 characters" in error["message"]


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})])
def test_answers_are_written_off_the_event_loop(client: Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict):
    threads: list[threading.Thread] = []
    write = tokenize_api.json_response
    monkeypatch.setattr(tokenize_api, "json_response", lambda answer: threads.append(threading.current_thread()) or write(answer))
    assert client.post(path, **body).status_code == 200
    assert [thread.name for thread in threads] == ["AnyIO worker thread"]


def test_it_works_off_the_event_loop(client: Client, monkeypatch: pytest.MonkeyPatch):
    """Others are answered while long texts are tokenized, however many."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_):
        begun.set()
        assert go_on.wait(20)
        return []

    monkeypatch.setattr(tokenize_api, "tokenize_request", slow)
    with ThreadPoolExecutor(50) as pool:
        for _ in range(50):
            pool.submit(client.post, "/tokenize", prompt="x")
        assert begun.wait(20)
        time.sleep(0.3)
        assert client.http.get("/health").status_code == 200
        assert client.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200  # its threads are others
        go_on.set()
