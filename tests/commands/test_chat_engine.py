"""jaxspec chat with an engine in its own process: the text is LLM.chat's, whatever the tree."""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxspec import LLM
from jaxspec.commands.chat import make_parser
from jaxspec.commands.chat_engine import EngineSource
from jaxspec.commands.chat_loop import Wishes
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.commands.conftest import TinyModel, text_of
from tests.commands.terminal import CTRL_C, CTRL_D, typed
from tests.live_server import optimizing
from tests.server.fakes import TEXT, FakeEngine, byte_tokenizer
from tests.sets import needs_smollm2

TREE, OTHER = TreeShape(1, 1), TreeShape(2, 1)
QUESTION = [{"role": "user", "content": "hello"}]


def started(model: TinyModel, said: list[str]) -> EngineSource:
    return EngineSource.of(make_parser().parse_args([*model.flags, "--context-length", "64"]), TREE, said.append)


class WarmEngine(FakeEngine):
    """Has nothing to compile."""

    def warm_up(self, *, progress: bool) -> float:
        return 0.0


@dataclass
class FakeModels:
    """LoadedModels without weights. Every tree gets an engine of its own."""

    tree: TreeShape
    made: list[TreeShape]
    name: str = "fake"
    directory: Path = Path()
    algorithm: str = "EAGLE"
    longest: int = 64
    tokenizer: Any = field(default_factory=byte_tokenizer)

    engines: list[WarmEngine] = field(default_factory=list)

    @property
    def trees(self) -> tuple[TreeShape, ...]:
        return (self.tree,)

    @property
    def engine(self) -> WarmEngine:
        self.made.append(self.tree)
        self.engines.append(WarmEngine())
        return self.engines[-1]


@pytest.fixture
def source() -> Iterator[EngineSource]:
    with contextlib.closing(EngineSource(FakeModels(TREE, []), lambda _: None)) as source:
        yield source


def test_an_answer_in_pieces_with_its_figures(source):
    pieces = list(source.answer(QUESTION, Wishes(max_tokens=12)))
    assert text_of(pieces) == TEXT[:12] and len(pieces) == 7 and pieces[-1].finish == "length"
    assert [piece.tokens for piece in pieces] == [1, 2, 2, 2, 2, 2, 1]
    assert sum(piece.forwards for piece in pieces) == 6 and sum(piece.forwarded for piece in pieces) == 11
    traced = list(source.answer(QUESTION, Wishes(max_tokens=12, shows_drafts=True)))
    assert text_of(traced) == TEXT[:12]
    assert {origin for piece in traced for _, origin in piece.spans} == {"prefill", "draft", "bonus"}


def test_another_tree_is_another_engine_and_plain_decoding_is_in_all(source):
    made = source._models.made
    for tree in (PLAIN, TREE, None):
        source.prepare(tree)
    assert made == [TREE]
    source.prepare(OTHER)
    source.prepare(PLAIN)
    source.prepare(None)
    assert made == [TREE, OTHER, TREE]
    source._models.algorithm = "NONE"
    with pytest.raises(ValueError, match="no drafts are loaded"):
        source.prepare(OTHER)
    assert text_of(list(source.answer(QUESTION, Wishes(max_tokens=3)))) == TEXT[:3]


@pytest.mark.exhaustive  # engines compile all of their programs
def test_another_tree_is_compiled_when_it_is_asked_for(model):
    said: list[str] = []
    with LLM(model.target, tree=PLAIN, max_running_requests=1, context_length=64) as llm:
        expected = llm.chat(QUESTION, {"temperature": 0, "max_tokens": 20})[0].text
    with contextlib.closing(started(model, said)) as source:
        first = list(source.answer(QUESTION, Wishes(max_tokens=20)))
        source.prepare(OTHER)
        other = list(source.answer(QUESTION, Wishes(OTHER, max_tokens=20)))
        source.prepare(None)
        assert source.about()["its tree"] == "1/1/2"
        again = list(source.answer(QUESTION, Wishes(max_tokens=20)))
    assert text_of(first) == text_of(other) == text_of(again) == expected
    assert any("compiling for 2/1/3" in line for line in said) and any(line.startswith("loaded in") for line in said)


def test_leaving_an_answer_ends_it_and_a_conversation_may_be_too_long(source):
    [engine] = source._models.engines
    engine.allow(1)
    pieces = source.answer(QUESTION, Wishes())
    next(pieces)
    pieces.close()
    engine.allow(1)  # the step that was under way
    assert source._thread.call(lambda engine: engine.running).result() == 0
    engine.allow(math.inf)
    with pytest.raises(ValueError, match=r"the conversation has 207 tokens, and 63 fit: /clear begins a new one"):
        next(source.answer([{"role": "user", "content": "x" * 200}], Wishes()))


def test_a_model_without_a_template_is_refused_with_what_to_do(model, tmp_path, capsys):
    from jaxspec.cli import main
    from jaxspec.testing import tiny_target, write_target

    where = write_target(tmp_path / "target", tiny_target(num_layers=2))
    byte_tokenizer(None).save_pretrained(where)
    assert main(["chat", str(where), "--tree", "plain"]) == 2
    assert "can't chat, `jaxspec generate` completes text with it" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.exhaustive
@needs_smollm2
def test_smollm2_in_a_terminal(tmp_path):
    """What a user does in the first minutes."""
    file = tmp_path / "chat.json"
    with typed("chat", "smollm2", **{"XLA_FLAGS": optimizing().get("XLA_FLAGS", "")}) as terminal:
        assert "loading smollm2" in terminal.expect("ready after", 900)
        terminal.line("What is the capital of France?")
        assert "The capital of France is Paris." in terminal.expect("tokens per forward of the target")
        terminal.line("Tell me a very long story about the sea.")
        terminal.expect(" the ")
        terminal.type(CTRL_C)
        terminal.expect(", stopped\n")
        terminal.line("/plain")
        terminal.line("/clear")
        terminal.line("What is the capital of France?")
        assert "The capital of France is Paris." in terminal.expect("1.00 tokens per forward of the target")
        terminal.line("/stats")
        assert "EAGLE3" in terminal.expect("all answers")
        terminal.line(f"/save {file}")
        terminal.expect("written: ")
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.end(120) == 0
    assert [each["role"] for each in json.loads(file.read_text())["messages"]] == ["user", "assistant"]
