"""jaxspec generate: the text is LLM.generate's, whatever its colours."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import fields

import pytest

from jaxspec import LLM, SamplingParams, TreeShape
from jaxspec.commands.generate import COLOURS, CONTROL, main, parse, summary
from jaxspec.engine.output import BONUS
from jaxspec.engine.request import GenerationOutput, Timing
from jaxspec.engine.speculation import CycleCounts, Speculation
from jaxspec.sampling_params import declaration
from jaxspec.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def few(model) -> list[str]:
    """A small tree and few tokens."""
    return [*model.flags, "--tree", "1/1/2", "--max-tokens", "12", "--ignore-eos"]


@pytest.fixture(scope="module")
def plain(model) -> Callable[[str], str]:
    """What plain decoding says to a prompt."""
    llm = LLM(model.target, tree=TreeShape(num_steps=0), max_running_requests=1)
    return lambda prompt: llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0].text


def test_the_text_goes_to_stdout_and_the_summary_to_stderr(few, plain, capsys):
    assert main(["def f(", *few]) == 0
    said = capsys.readouterr()
    assert said.out == plain("def f(") + "\n"
    assert re.fullmatch(r"12 tokens in [\d.]+ s, [\d.]+ tokens/s, accept length [\d.]+, ended by length\n", said.err)


def test_a_text_does_not_command_the_terminal(few, plain, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for colour in ("never", "always"):
        assert main(["def f(", *few, "--color", colour]) == 0
        shown = re.sub(r"\033\[\d+m", "", capsys.readouterr().out)
        assert shown == plain("def f(").translate(CONTROL) + "\n" and "\N{REPLACEMENT CHARACTER}" in shown


def test_a_prompt_that_leaves_room_for_one_token(few, capsys):
    assert main(["d", *few, "--context-length", "2", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().err.startswith("1 token in ")


def test_the_prompt_may_come_from_stdin_and_colours_change_no_character(few, plain, capsys, monkeypatch):
    text = plain("def f(")
    stop = text[3:6]
    monkeypatch.setattr("sys.stdin", io.StringIO("def f("))
    assert main(["-", *few, "--color", "always", "--stop", stop]) == 0
    said = capsys.readouterr()
    assert re.sub(r"\033\[\d+m", "", said.out) == text[: text.index(stop)] + "\n"
    assert COLOURS[BONUS] in said.out and "accepted draft" in said.err and "ended by stop" in said.err


@pytest.mark.exhaustive  # with the built-in model: the tiny one's vocabulary has no 256 bytes
def test_a_schema_makes_the_text_json(tmp_path, capsys):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 2}')
    status = main(["[", "--tree", "1/1/2", "--max-tokens", "60", "--json-schema", str(schema)])
    said = capsys.readouterr()
    assert status == 0, said.err
    assert json.loads(said.out) in [[first, second] for first in "ab" for second in "ab"]


@pytest.mark.parametrize(("text", "said"), [("[1]", "holds a list; expected a JSON object"), ("{", "is not valid JSON")])
def test_a_file_that_holds_no_schema_is_refused(text, said, tmp_path, capsys):
    (tmp_path / "schema.json").write_text(text)
    assert main(["x", "--json-schema", str(tmp_path / "schema.json")]) == 2
    assert said in capsys.readouterr().err


def test_chat_puts_the_prompt_into_the_template(few, plain, model, capsys):
    assert main(["hello", *few, "--chat"]) == 0
    conversation = load_tokenizer(model.target).apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert conversation != "hello" and capsys.readouterr().out == plain(conversation) + "\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x", "--temperature", "-1"], "temperature must be a number between 0"),
        (["x", "--tree", "2/1/3", "--speculative-num-steps", "2"], "not both"),
        (["x", "--model-path", "/nowhere"], "/nowhere"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxspec generate: error: ") and said in error and error.count("\n") == 1


def test_every_parameter_with_an_option_has_its_help_and_default():
    options = vars(parse(["x"]))
    declared = {field.name: field.default for field in fields(SamplingParams) if declaration(field.name).cli is not None}
    assert {name: options[name] for name in declared} == declared | {"temperature": 0.0, "stop": []}
    assert len(declared) == 12
    given = ["--min-tokens", "2", "--presence-penalty", "0.5", "--seed", "7", "--stop", "a", "--stop", "b", "--ignore-eos"]
    options = vars(parse(["x", *given]))
    assert (options["min_tokens"], options["presence_penalty"], options["seed"]) == (2, 0.5, 7)
    assert (options["stop"], options["ignore_eos"]) == (["a", "b"], True)


def finished(matched: int | str | None) -> GenerationOutput:
    speculation = Speculation((CycleCounts(3, 2, 3, 3),))
    return GenerationOutput("a", (1,), "abcd", (97,) * 4, "length", matched, speculation, Timing(0, 0, 1))


def test_the_summary_says_when_compilation_is_part_of_the_time():
    said = summary(finished(None), 2.0, compiled=True)
    assert said == "4 tokens in 2.00 s, 2.0 tokens/s, accept length 3.00, ended by length, including compilation"
