"""What the target writes to be learnt from: prompts in their files' shapes, answers, shards that are written once."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxspec.commands.common import Chat, load_prompts
from jaxspec.engine.request import GenerationRequest
from jaxspec.load import load_models
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import largest_sizes_only
from jaxspec.text.chat_template import RenderError
from jaxspec.text.prompts import ChatEncoder
from jaxspec.train import command, conversations
from jaxspec.train.conversations import DataSettings, Writer, is_repetitive, read_prompts, read_shards, topic_prompts, write_shards
from tests.engine.served import served, updates_of
from tests.reference import TARGET

SETTINGS = DataSettings("built-in", per_shard=4, max_user_tokens=12, max_answer_tokens=12)


@pytest.fixture(scope="module")
def llm():
    llm = load_models(tree="plain", max_running_requests=4, context_length=128, prefill_chunk=64)
    largest_sizes_only(llm.engine)
    return llm


def test_prompts_in_all_shapes(tmp_path):
    lines = (
        {
            "prompt": "as in UltraChat, the first message again",
            "messages": [
                {"role": "system", "content": "Short."},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
            ],
        },
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]},
        {"prompt": "x"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a\u2028"}, {"type": "text", "text": "b"}]}]},
    )
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n")
    first, second, third, fourth = read_prompts(tmp_path / "prompts.jsonl")
    assert fourth == [{"role": "user", "content": "a\u2028b"}], "a line break of Unicode's within a string ends no line"
    assert [message["role"] for message in first] == ["system", "user", "assistant"]
    assert [message["content"] for message in second] == ["a", "b", "c"] and third == [{"role": "user", "content": "x"}]
    (tmp_path / "prompts.txt").write_text("\ufeffone\n\ntwo\n")  # with a mark of its byte order
    assert read_prompts(tmp_path / "prompts.txt") == [[{"role": "user", "content": text}] for text in ("one", "two")]
    image = '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}'
    for wrong in (
        image,
        "{",
        "[]",
        "{}",
        '{"messages": []}',
        '{"messages": [{"role": "tool", "content": "x"}]}',
        '{"messages": 3}',
    ):
        (tmp_path / "wrong.jsonl").write_text('{"prompt": "x"}\n' + wrong)
        with pytest.raises(ValueError, match=r"wrong.jsonl, line 2: expected messages, conversations or prompt"):
            read_prompts(tmp_path / "wrong.jsonl")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"empty.txt holds no prompts"):
        read_prompts(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"can't read .*latin.txt: "):
        read_prompts(tmp_path / "latin.txt")


@pytest.mark.variants
def test_prompts_are_made_of_topics():
    """More are the same and some more; no two begin alike, and none is one of those that benchmarks use."""
    prompts = topic_prompts(3000, 0, SETTINGS)
    assert topic_prompts(100, 0, SETTINGS) == prompts[:100] != topic_prompts(100, 1, SETTINGS)
    first = [messages[0]["content"] for messages in prompts]
    assert len(set(first)) == 3000 and not any("{" in text and "}" not in text for text in first)
    assert {len(messages) for messages in prompts} == {1, 2, 3}
    assert all(message["role"] == "user" for messages in prompts for message in messages)
    known = {str(chat.messages[0]["content"]) for chat in load_prompts(Path("chat"), None).prompts if isinstance(chat, Chat)}
    assert len(known) == 48 and not known & set(first)
    with pytest.raises(ValueError, match=r"topics.toml makes about \d+ prompts, 50000 are needed: give a file of your own"):
        topic_prompts(50_000, 0, SETTINGS)


@pytest.mark.variants
def test_answers_are_the_targets_own(llm):
    """Tokens are the prompt in the chat template and the answer; greedy answers are what the target says then."""
    prompts = [[{"role": "user", "content": text}] for text in ("def f(x):", "class A:", "import os", "import re")]
    greedy = DataSettings("built-in", per_shard=4, max_answer_tokens=12, temperatures=(0.0,))
    with Writer(llm, greedy, prompts) as writer:
        written = writer.shard(0)
    assert len(written) == 4
    chats = ChatEncoder(llm.tokenizer)
    for messages, (tokens, [(start, end)], _) in zip(prompts, written, strict=True):
        assert tokens[:start] == chats.encode(messages) and end == len(tokens) <= start + 12
        (request,) = served(llm.engine, GenerationRequest(tokens[:start], SamplingParams(temperature=0, max_tokens=12)))
        assert request.output == tokens[start:]
    chats.close()


@pytest.mark.variants
def test_answers_keep_their_tokens_even_where_their_text_has_others(llm, monkeypatch):
    step, answers = llm.engine.step, []

    def noted():
        updates = step()
        answers.extend(update.output for update in updates if update.output)
        return updates

    monkeypatch.setattr(llm.engine, "step", noted)
    odd = DataSettings("built-in", per_shard=4, max_answer_tokens=24, temperatures=(2.0,))
    with Writer(llm, odd, [[{"role": "user", "content": "def f(x):"}]] * 4) as writer:
        written = writer.shard(0)
    tokens = [list(answer.token_ids) for answer in answers]
    assert sorted(each.tokens[start:] for each in written for start, _ in each.answers) == sorted(tokens)
    assert any(llm.tokenizer.encode(answer.text) != list(answer.token_ids) for answer in answers)


@pytest.mark.variants
def test_the_engine_is_kept_busy_with_one_kind_of_request(llm, monkeypatch):
    """And a conversation is the same alone."""
    add, asked = llm.engine.add, []
    monkeypatch.setattr(llm.engine, "add", lambda question: asked.append(question.params.temperature > 0) or add(question))
    settings = DataSettings("built-in", per_shard=12, max_user_tokens=12, max_answer_tokens=12, temperatures=(0.0, 1.0))
    with Writer(llm, settings, None) as writer:
        together = writer.shard(0)
        switches = sum(one != other for one, other in itertools.pairwise(asked))
        assert len(asked) > 12 and set(asked) == {False, True} and switches <= 4
        alone = [writer._run([writer._write(None, random.Random(f"0 0 {index}"))]) for index in range(12)]
    assert together == [conversation for each in alone for conversation in each]


@pytest.mark.variants
def test_a_failure_of_the_engine_ends_no_shard(llm, monkeypatch):
    def failing():
        return [
            replace(each, output=each.output and replace(each.output, finish_reason="error", error="no memory")) for each in step()
        ]

    step = llm.engine.step
    with monkeypatch.context() as context, Writer(llm, SETTINGS, None) as writer:
        context.setattr(llm.engine, "step", failing)
        with pytest.raises(ValueError, match="the engine failed, and the shard is left out: no memory"):
            writer.shard(0)
    updates_of(llm.engine)


def test_a_conversation_that_the_template_refuses_is_left_out(llm, monkeypatch, capsys):
    prompts = [[{"role": "user", "content": text}] for text in ("x = 1", "a bad one", "y = 2")]
    with Writer(llm, replace(SETTINGS, per_shard=2), prompts) as writer:
        render = writer._template.render

        def refusing(messages):
            if "bad" in messages[0]["content"]:
                raise RenderError("no such role")
            return render(messages)

        monkeypatch.setattr(writer._template, "render", refusing)
        assert [len(writer.shard(number)) for number in (0, 1)] == [1, 1]
    assert "conversation 1 is left out: no such role" in capsys.readouterr().out


def test_several_turns_are_answered_in_order(llm, monkeypatch):
    """The file's own answers are left out. The built-in model's template has no second turn, so this one has a stand-in."""
    said = ("user", "import os"), ("assistant", "(left out)"), ("user", "\nimport re"), ("user", "\nimport sys")
    script = [{"role": role, "content": content} for role, content in said]

    def encode(text):
        return llm.tokenizer.encode(text, add_special_tokens=False)

    def answer(text, finish_reason="stop"):
        return SimpleNamespace(token_ids=tuple(encode(text)), text=text, finish_reason=finish_reason)

    with Writer(llm, SETTINGS, None) as writer:
        monkeypatch.setattr(writer._template, "render", lambda messages: "".join(message["content"] for message in messages))
        for last in ("stop", "length"):
            writing = writer._write(script, random.Random(0))
            assert list(next(writing).prompt) == encode("import os")
            assert list(writing.send(answer("\nx = 1")).prompt) == encode("import os\nx = 1\nimport re")
            with pytest.raises(StopIteration) as ended:
                writing.send(answer("\ny = 2", last))
                writing.send(answer("\nz = 3"))
            found = ended.value.value
            texts = [llm.tokenizer.decode(found.tokens[start:end]) for start, end in found.answers]
            assert texts == ["\nx = 1", "\ny = 2", "\nz = 3"][: len(texts)] and len(texts) == (3 if last == "stop" else 2)
            rest = "\nimport sys\nz = 3" if last == "stop" else ""
            assert llm.tokenizer.decode(found.tokens) == f"import os\nx = 1\nimport re\ny = 2{rest}"


def test_a_conversation_ends_where_it_has_no_room(llm):
    users = [[{"role": "user", "content": f"x = {'1 + ' * count}1"}] * turns for count, turns in ((4, 1), (200, 1), (12, 9))]
    settings = DataSettings("built-in", max_tokens=64, max_answer_tokens=40, temperatures=(0.7,))
    with Writer(llm, settings, users) as writer:
        found = writer.shard(0)
    assert 1 <= len(found) <= 2 and all(len(each.tokens) <= 64 for each in found), "the second is too long from the start"


def test_shards_are_written_once_and_alike(llm, tmp_path, monkeypatch):
    prompts = [[{"role": "user", "content": f"x = {number}"}] for number in range(6)]
    write_shards(llm, SETTINGS, prompts, tmp_path / "one", 2)
    assert [file.name for file in sorted((tmp_path / "one").iterdir())] == [
        "settings.json",
        "shard-00000.jsonl",
        "shard-00001.jsonl",
    ]
    found = list(read_shards(tmp_path / "one"))
    assert len(found) == 6
    (tmp_path / "one/shard-00000.jsonl").unlink()
    write_shards(llm, SETTINGS, prompts, tmp_path / "one", 2)
    assert list(read_shards(tmp_path / "one")) == found
    monkeypatch.setattr(conversations.Writer, "shard", lambda *_: pytest.fail("it was written again"))
    write_shards(llm, SETTINGS, prompts, tmp_path / "one", 2)
    with pytest.raises(ValueError, match="holds conversations of other settings"):
        write_shards(llm, DataSettings("built-in", seed=1), prompts, tmp_path / "one", 2)


def test_repetitions_are_told_from_text():
    assert is_repetitive("the same again. " * 40)
    prose = (
        "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. Leaves do most of it, and their green comes "
    )
    assert not is_repetitive(
        prose + "from chlorophyll, which absorbs red and blue light. Without it, nearly nothing on land could live."
    )
    assert not is_repetitive("no no no no")


@pytest.mark.parametrize(
    ("given", "work"),
    [("run --out a/head", "a/head.work"), ("run --out a/head --work b", "b"), ("data --data c", "None"), ("run --out .", ".work")],
)
def test_the_work_folder_lies_beside_the_head(monkeypatch, given, work):
    monkeypatch.setattr(command, "run", lambda options: found.append(str(options.work)) or 0)
    found: list[str] = []
    assert command.main([*given.split(), "--model-path", "m"]) == 0 and found == [work]


def test_data_and_run_have_folders_of_their_own(capsys):
    assert command.main(["run", "--data", "a/../b", "--work", "b", "--out", "c", "--model-path", "m"]) == 2
    assert "--data and --work are both" in capsys.readouterr().err


def test_packages_that_are_missing_are_named_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "tensorboardX" else name)
    monkeypatch.setattr("jaxspec.load.load_models", lambda *_, **__: pytest.fail("too late"))
    assert command.main(["run", "--out", "no-such-head", "--model-path", "smollm2"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("needs tensorboardX, which is not installed: pip install 'jaxspec-llm[train]'\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--begin nowhere", "nowhere does not exist: "),
        ("--begin org/none", "org/none is "),
        ("--length 48", "--length must be more than the 64 tokens of an evaluation, got 48"),
    ],
)
def test_what_training_could_not_use_is_refused_before_any_text_is_written(monkeypatch, capsys, given, said):
    monkeypatch.setattr("jaxspec.load.load_models", lambda *_, **__: pytest.fail("too late"))
    assert command.main(["run", "--out", "no-such-head", "--model-path", str(TARGET), *given.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_has_begun_gets_no_more_data(tmp_path):
    idle = SimpleNamespace(engine=SimpleNamespace(context_length=64))
    (tmp_path / "settings.json").write_text('{"shards": 8}')
    (tmp_path / "best.json").write_text("{}")
    options = command.make_parser("run").parse_args(["--model-path", "m", "--work", str(tmp_path), "--shards", "9"])
    with pytest.raises(ValueError, match="holds a run on 8 shards: give --shards 8, or another folder"):
        command.write_data(options, idle, tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("given", "missing"), [("run", "--out"), ("head --out h", ""), ("data", "--data"), ("head", "--data and --out")]
)
def test_what_is_missing_is_named(monkeypatch, capsys, given, missing):
    monkeypatch.setattr(command, "run", lambda options: 0)
    if missing:
        with pytest.raises(SystemExit):
            command.main([*given.split(), "--model-path", "m"])
        assert f"needs {missing}\n" in capsys.readouterr().err.replace(" (see --help)", "")
    else:
        assert command.main([*given.split(), "--model-path", "m"]) == 0


def test_a_model_whose_template_marks_no_turns_writes_texts(llm):
    """Its users' turns begin a text and break off; the answer goes on with it."""
    settings = DataSettings("built-in", per_shard=4, max_user_tokens=12, max_answer_tokens=12)
    with Writer(llm, settings, None) as writer:
        found = writer.shard(0)
    assert 1 <= len(found) <= 4
    for tokens, answers, _ in found:
        [(start, end)] = answers
        assert 1 < start < end == len(tokens)


def test_an_answer_ends_where_it_repeats_itself(llm):
    prose = llm.tokenizer.encode("def area(self, width, height):\n    return width * height\n", add_special_tokens=False)
    again = llm.tokenizer.encode("self.x = None\n", add_special_tokens=False) * 60
    with Writer(llm, SETTINGS, None) as writer:
        assert writer._before_it_repeats(prose) == prose
        left = writer._before_it_repeats(prose + again)
        assert left == (prose + again)[: len(left)] and 0 < len(left) < len(again)
        assert not is_repetitive(llm.tokenizer.decode(left)) and len(left) % conversations.CUT == 0


def test_users_of_a_base_model_begin_at_any_line(llm):
    names = ("abs", "bin", "chr", "dir", "eval", "float", "getattr", "hash", "int", "len")
    lines = [f"{name} = {number}" for number, name in enumerate(names)]
    output = SimpleNamespace(token_ids=tuple(range(50)), text="\n".join(lines), finish_reason="length")
    begun = set()
    with Writer(llm, DataSettings("built-in"), None) as writer:
        for seed in range(60):
            writing = writer._invent([], random.Random(seed))
            next(writing)
            with pytest.raises(StopIteration) as ended:
                writing.send(output)
            assert output.text.endswith(ended.value.value)
            begun.add(ended.value.value.split("\n")[0])
    assert begun == set(lines[:5])


def test_a_base_model_repeats_itself_in_its_data_as_when_it_serves(llm):
    again = llm.tokenizer.encode("self.x = None\n", add_special_tokens=False) * 20
    output = SimpleNamespace(token_ids=tuple(again), text="self.x = None\n" * 20, finish_reason="length")
    with Writer(llm, DataSettings("built-in"), None) as writer:
        for is_plain, learnt in ((True, len(again)), (False, len(writer._before_it_repeats(again)))):
            writer._is_plain = is_plain
            writing = writer._write([{"role": "user", "content": "def f(self):"}], random.Random(0))
            next(writing)
            with pytest.raises(StopIteration) as ended:
                writing.send(output)
            [(start, end)] = ended.value.value.answers
            assert end - start == learnt
    assert learnt < len(again)
