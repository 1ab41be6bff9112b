"""jaxspec chat --url: a conversation with a real HTTP server over the fake engine, in a terminal."""

import math
import time
from collections.abc import Iterator

import pytest

from jaxspec.commands import chat_server
from jaxspec.commands.chat_loop import Wishes
from jaxspec.commands.chat_screen import THINKING
from jaxspec.commands.chat_server import ServerSource, error_of, piece_of
from jaxspec.server.model import ServedModel
from jaxspec.server.settings import ServerSettings
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.commands.conftest import text_of
from tests.commands.terminal import CTRL_C, typed
from tests.server.conftest import serving
from tests.server.fakes import TEXT, TREE, FakeEngine, byte_tokenizer

SHOWN = (TEXT * 40).encode()[:40].decode()
QUESTION = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def url(engine) -> Iterator[str]:
    tokenizer = byte_tokenizer()
    model = ServedModel("fake", 4096, TREE, tokenizer, ChatTemplate.of_model(tokenizer), (TREE, PLAIN))
    with serving(engine, model) as url:
        yield url


def test_an_answer_in_pieces_with_its_figures(url):
    pieces = list(ServerSource(url).answer(QUESTION, Wishes(max_tokens=12)))
    assert text_of(pieces) == (TEXT * 12)[:12] and sum(piece.tokens for piece in pieces) == 12
    assert len([piece for piece in pieces if piece.spans]) > 3, "as they come"
    assert sum(piece.forwards for piece in pieces) == 6 and sum(piece.forwarded for piece in pieces) == 11
    assert [piece.finish for piece in pieces if piece.finish] == ["length"]


def test_drafts_are_traced_on_demand_and_the_text_is_the_same(url):
    plain, traced = (list(ServerSource(url).answer(QUESTION, Wishes(max_tokens=12, shows_drafts=it))) for it in (False, True))
    assert text_of(plain) == text_of(traced)
    origins = {origin for piece in traced for _, origin in piece.spans}
    assert {"draft", "bonus"} <= origins and {origin for piece in plain for _, origin in piece.spans} == {""}


def test_settings_reach_the_server_and_its_refusal_the_user(url, engine):
    source = ServerSource(f"{url}/v1/")
    list(source.answer(QUESTION, Wishes(PLAIN, 0.25, 3)))
    assert engine.params[-1].temperature == 0.25 and engine.params[-1].max_tokens == 3
    with pytest.raises(ValueError, match="status 400: speculative: the tree 9/1/10 is not compiled; this server has"):
        list(source.answer(QUESTION, Wishes(TreeShape(9, 1), max_tokens=3)))


def test_a_server_can_not_command_the_terminal(url, monkeypatch):
    monkeypatch.setattr(chat_server, "json_of", lambda _: {"data": [{"id": "m\x1b]52;c;eA==\x07"}]})
    source = ServerSource(url)
    assert source.about()["model"] == "m\ufffd]52;c;eA==\ufffd" and source.model.startswith("m\x1b")
    assert error_of({"error": {"message": "a\x1b[2J\x9b b\n c"}}) == "a\ufffd[2J\ufffd b c"


def test_a_server_that_wants_a_key():
    tokenizer = byte_tokenizer()
    model = ServedModel("fake", 4096, TREE, tokenizer, ChatTemplate.of_model(tokenizer), (TREE,))
    with serving(FakeEngine(), model, ServerSettings(api_key="secret")) as url:
        with pytest.raises(ValueError, match=r"status 401: .*: give --api-key, or set JAXSPEC_API_KEY"):
            ServerSource(url)
        with pytest.raises(ValueError, match=r"^--api-key, or JAXSPEC_API_KEY, must be visible ASCII characters"):
            ServerSource(url, "secret\r")
        assert text_of(list(ServerSource(url, "secret").answer(QUESTION, Wishes(max_tokens=3)))) == TEXT[:3]


def test_a_conversation_in_a_terminal(url, engine):
    """An answer that streams, Ctrl-C, the next question, commands, and the end."""
    engine.allow(math.inf)
    with typed("chat", "--url", url, "--max-tokens", "40") as terminal:
        terminal.expect("/help lists the commands")
        terminal.line("hello")
        assert SHOWN in terminal.expect("tokens per forward of the target, first token after ")
        engine.allow(5)
        terminal.line("and now?")
        terminal.expect(TEXT[:9])
        terminal.type(CTRL_C)
        terminal.expect(", stopped\n")
        for _ in range(25):  # an engine that is in a step learns of it afterwards
            if not engine.aborted:
                engine.allow(1)
                time.sleep(0.1)
        assert engine.aborted, "the server was told"
        engine.allow(math.inf)
        terminal.line("/plain")
        terminal.expect("plain decoding\n")
        terminal.line("/colour")
        terminal.line("again")
        terminal.expect("40 tokens")
        said = f"user: hello\nassistant: {SHOWN}\nuser: and now?\nassistant: {TEXT[:9]}\nuser: again\n"
        assert engine.prompts[-1] == tuple(said.encode())
        terminal.line("/stats")
        assert "none, plain decoding" in terminal.expect("all answers")
        terminal.expect("> ")
        terminal.interrupt("half a line", "Ctrl-C again")
        terminal.line("/quit")
        assert terminal.end() == 0


def test_thinking_is_told_from_the_answer():
    thought = piece_of({"choices": [{"delta": {"reasoning_content": "hm"}}], "usage": None})
    assert thought.spans == (("hm", THINKING),)
