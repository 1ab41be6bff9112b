"""The workbench: what it counts, and contexts that hold the prompts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.cli import main
from jaxspec.commands import chat_engine, workbench
from jaxspec.commands.common import Chat, PromptSet, Turns
from jaxspec.commands.options import Parser, add_model_options
from jaxspec.commands.workbench import CompilationCounter, Workbench, count_equal, depth_acceptance, mean, run
from jaxspec.config import EngineConfig
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import engine_target, tiny_config, tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape
from tests.server.fakes import byte_tokenizer


def test_acceptance_by_depth():
    assert depth_acceptance([1, 3, 3, 2]) == [0.75, 0.667]
    assert depth_acceptance([]) == []


def test_small_helpers():
    assert count_equal([[1], [2]], [(1,), (3,)]) == 1
    assert mean([1, 2]) == 1.5 and mean([]) == 0.0


@pytest.mark.parametrize(("longest", "context"), [(10, 256), (246, 256), (247, 512), (900, 1000)])
def test_contexts_grow_by_powers_of_two(longest, context):
    bench = SimpleNamespace(models=SimpleNamespace(target=SimpleNamespace(config=tiny_config(max_position_embeddings=1000))))
    assert Workbench.context_for(bench, [[1], [1] * longest], 10) == context  # type: ignore


def test_prompts_that_are_too_long_for_the_model_are_an_error():
    bench = SimpleNamespace(models=SimpleNamespace(target=SimpleNamespace(config=tiny_config(max_position_embeddings=20))))
    with pytest.raises(ValueError, match="need 21 tokens, but the model's limit is 20"):
        Workbench.context_for(bench, [[1] * 11], 10)  # type: ignore


def test_conversations_are_put_into_the_chat_template():
    """With or without --chat; texts only with it."""
    tokenizer = byte_tokenizer(chat_template="{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}")
    bench: Any = Workbench.__new__(Workbench)
    bench.models = SimpleNamespace(tokenizer=tokenizer, encode=tokenizer.encode)
    chat = Chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert bench.encode([chat, "a"]) == [tokenizer.encode("<user>a<assistant>b"), tokenizer.encode("a")]
    assert bench.encode([chat, "a"], chat=True)[1] == tokenizer.encode("<user>a")
    with pytest.raises(ValueError, match="one consists of token ids"):
        bench.encode([[1, 2]], chat=True)
    bench.models.tokenizer = byte_tokenizer(chat_template=None)
    with pytest.raises(ValueError, match="the model has no chat template: leave out --chat, or give prompts of text"):
        bench.encode([chat])


def test_questions_are_asked_one_after_another():
    bench: Any = Workbench.__new__(Workbench)
    bench._answers = lambda chats, max_tokens: [f"{len(chats)}: {chat.messages[-1]['content']}"[:max_tokens] for chat in chats]
    given = PromptSet("a file", ["alone", Turns(["a", "b"]), Turns(["c"]), Turns(["d", "e", "f"])], ["x", "y", "z", "z"])
    asked = bench.ask(given, 4)
    assert asked.kinds == ["x", "y", "y", "z", "z", "z", "z"] and bench.ask(asked, 4) is asked
    a, c, d = (Chat([{"role": "user", "content": each}]) for each in "acd")
    e = d.then("2: d", "e")
    assert asked.prompts == ["alone", a, a.then("2: a", "b"), c, d, e, e.then("1: e", "f")]


@pytest.mark.exhaustive
def test_the_model_answers_itself():
    """With the text of plain decoding."""
    bench: Any = Workbench.__new__(Workbench)
    tokenizer = byte_tokenizer(chat_template="{% for message in messages %}<{{ message.content }}>{% endfor %}")
    target = engine_target(max_position_embeddings=64)
    bench.models = SimpleNamespace(target=target, head=None, tokenizer=tokenizer, config=EngineConfig())
    first, second = bench.ask(PromptSet("a file", [Turns(["a", "b"])]), 4).prompts
    params = [SamplingParams(max_tokens=4, temperature=0)]
    [answer] = run(bench.engine(PLAIN, 1, 64), bench.encode([first]), params).outputs
    assert second == first.then(answer.text, "b") and answer.text


def test_a_pass_finds_nothing_that_the_last_one_left():
    engine = tiny_engine(PLAIN)
    params = [SamplingParams(max_tokens=2, temperature=0.0)]
    passes = [run(engine, [list(range(10))], params) for _ in range(2)]
    assert [each.outputs[0].cached_tokens for each in passes] == [0, 0]  # it is longer than a page
    assert passes[0].tokens == passes[1].tokens and passes[1].accept_length == 1


def test_a_pass_keeps_as_many_requests_in_flight_as_it_is_told(monkeypatch):
    engine, seen = tiny_engine(PLAIN), []
    step = engine.step

    def counting():
        seen.append(engine.stats().running + engine.stats().waiting)
        return step()

    monkeypatch.setattr(engine, "step", counting)
    prompts, params = [[1, 2], [3, 4], [5, 6]], [SamplingParams(max_tokens=count, temperature=0.0) for count in (5, 2, 3)]
    assert [len(tokens) for tokens in run(engine, prompts, params, concurrency=2).tokens] == [5, 2, 3] and max(seen) == 2


def test_compilations_are_counted():
    numbers = jnp.arange(7).block_until_ready()
    counter = CompilationCounter()
    program = jax.jit(lambda x: x * 3 + 5)
    for _ in range(2):
        program(numbers).block_until_ready()
    assert counter.count == 1


def test_every_command_that_loads_a_model_takes_the_same_revision_and_directory(monkeypatch):
    seen: dict = {}
    monkeypatch.setattr(workbench, "load_models", lambda *_, **options: seen.update(options))
    parser = Parser("jaxspec check", "")
    add_model_options(parser)
    words = "--model-path org/name --revision v2 --speculative-draft-model-revision v3 --download-dir /disk"
    workbench.Workbench.of(parser.parse_args(words.split()))
    found = seen["revision"], seen["speculative_draft_model_revision"], seen["download_dir"]
    assert found == ("v2", "v3", Path("/disk"))


@pytest.mark.parametrize("command", ["generate x", "chat smollm2", "check-draft", "check-lossless"])
def test_every_command_that_runs_a_model_takes_n_grams_and_an_8_bit_cache(monkeypatch, command: str, capsys):
    def load(model: object, draft: str, **options) -> None:
        raise ValueError(f"{draft} {options['ngram']} {options['kv_cache_dtype']}")

    for loading in (workbench, chat_engine):
        monkeypatch.setattr(loading, "load_models", load)
    flags = "--draft ngram --speculative-ngram --kv-cache-dtype fp8"
    assert main(f"{command} {flags}".split()) == 2
    assert capsys.readouterr().err.endswith(f"jaxspec {command.split()[0]}: error: ngram True fp8_e4m3\n")


def test_engines_draft_and_round_as_the_model_was_loaded():
    bench = Workbench(None, "ngram", kv_cache_dtype="fp8_e4m3")
    drafting, plain = (bench.engine(tree, 1, 64).config for tree in (TreeShape(2, 1), PLAIN))
    assert (drafting.ngram, plain.ngram) == (True, False) and drafting.kv_cache_dtype == plain.kv_cache_dtype == "fp8_e4m3"
