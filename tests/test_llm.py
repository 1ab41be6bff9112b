"""What users call, on the built-in model: the README's example, and the promise on held-out prompts."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxspec import LLM, SamplingParams, TreeShape
from jaxspec.demo.corpus import heldout_prompts
from jaxspec.llm import _as_list
from jaxspec.load import ending_with
from jaxspec.testing import engine_target, largest_sizes_only, random_eagle, random_head, tiny_target, write_head, write_target
from jaxspec.tree_shape import PLAIN
from tests.server.conftest import wait_until

ROOT = Path(__file__).parents[1]


def test_the_readme_example_runs(capsys):
    ((code, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    names["llm"].close()
    assert capsys.readouterr().out == printed
    assert names["output"].speculation.accept_length > 1.5


def test_the_examples_of_the_python_page_run(capsys):
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL):
        exec(compile(code, "python.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines[:2]] == ["0", "1"] and len(lines) > 6 and "['" in lines[-1]


def small_llm(**options) -> LLM:
    """The built-in model with room for the prompts here: few and small programs to compile."""
    llm = LLM(max_running_requests=2, context_length=256, prefill_chunk=64, **options)
    largest_sizes_only(llm.engine)
    return llm


@pytest.fixture(scope="module")
def plain() -> LLM:
    return small_llm(tree=PLAIN)


@pytest.fixture(scope="module")
def fast() -> LLM:
    return small_llm()


def test_speculation_gives_the_same_tokens_and_fewer_forwards(plain, fast):
    prompts = heldout_prompts(6)
    params = [SamplingParams(max_tokens=40, temperature=(0.0, 0.8)[i % 2], seed=i, ignore_eos=True) for i in range(6)]
    expected, got = plain.generate(prompts, params), fast.generate(prompts, params)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]
    assert [output.text for output in got] == [output.text for output in expected]
    assert {output.speculation.accept_length for output in expected} == {1.0}
    forwards = [sum(output.speculation.verify_count for output in outputs[::2]) for outputs in (got, expected)]
    assert forwards[0] < forwards[1] / 1.8


def test_text_prompts_and_token_prompts_are_the_same(fast):
    params = SamplingParams(max_tokens=5, temperature=0)
    ids = fast.tokenizer.encode("class A:\n")
    by_text, by_ids = fast.generate(["class A:\n", ids], params)
    assert by_text.token_ids == by_ids.token_ids == fast.generate(ids, params)[0].token_ids


def test_one_bad_prompt_is_named_and_nothing_is_left_behind(fast):
    with pytest.raises(ValueError, match="prompt 1: prompt is empty"):
        fast.generate(["def f():\n", []], SamplingParams(max_tokens=3))
    wait_until(lambda: not fast.engine.has_work)
    with pytest.raises(ValueError, match="2 prompts but 1 SamplingParams"):
        fast.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(ValueError, match="mixes token ids with prompts"):
        _as_list([1, "a"])
    assert _as_list("a") == ["a"] and _as_list([1, 2]) == [[1, 2]] and _as_list(["a", [1]]) == ["a", [1]]


@pytest.mark.variants
def test_a_directory_without_a_tokenizer_works_with_token_ids(tmp_path):
    target = engine_target(vocab_size=256)
    model, head = write_target(tmp_path / "target", target), write_head(tmp_path / "head", random_eagle(target.config))
    llm = LLM(model, head, TreeShape(2, 2, 4), page_size=4, max_running_requests=2, prefill_chunk=16)
    largest_sizes_only(llm.engine)
    assert llm.model_name == str(model)
    output = llm.generate([5, 6, 7], SamplingParams(max_tokens=4, temperature=0))[0]
    assert len(output.token_ids) == 4 and output.text == ""
    with pytest.raises(ValueError, match="no tokenizer: give lists of token ids"):
        llm.generate("text")
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.generate([5], SamplingParams(stop="x"))
    assert LLM(model).engine.tree == PLAIN  # a model of one's own without a head decodes plainly


def test_impossible_combinations_are_refused(tmp_path):
    model = write_target(tmp_path / "target", tiny_target())
    for options, message in (
        ({"tree": TreeShape()}, "5/4/8 needs a draft head"),
        ({"dtype": "int8"}, "dtype must be auto"),
        ({"tree": "5-4-8"}, r"a draft tree is num_steps/topk/num_draft_tokens.*got '5-4-8'"),
        ({"token_map": "map.json"}, r"the token map map\.json needs a draft head to work on: give draft"),
        ({"tree": PLAIN, "token_map": "map.json"}, "drafts nothing: leave out token_map"),
        ({"tree": PLAIN, "draft": model}, r"drafts nothing: leave out draft$"),
        ({"speculative_draft_model_quantization": "int8"}, "^speculative_draft_model_quantization needs a draft head"),
        ({"draft": "ngram", "ngram": False}, "draft='ngram' and ngram=False contradict each other"),
        ({"adaptive": True}, "^adaptive needs a draft head"),
        ({"ngram": True, "ngram_share": 1 << 30}, r"^ngram_share is 1073741824 MB, and \d+ MB of memory are available: lower it"),
        ({"draft_window_size": 8, "draft_sink_size": 4}, "^draft_window_size needs a draft head"),
        ({"accept_threshold_acc": 0.5}, "^accept_threshold_acc needs a draft head"),
        ({"row_cost": 0.1}, "^row_cost needs a draft head"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(model, **options)
    with pytest.raises(ValueError, match="topk=65 is more than the 64 tokens that can be drafted behind another: lower topk"):
        LLM(model, write_head(tmp_path / "head", random_head(tiny_target().config)), TreeShape(1, 65, 9))
    with pytest.raises(ValueError, match="does not exist: give a directory"):
        LLM(tmp_path / "nothing")
    for wrong in ((5,), (b"x",), (None, b"d")):
        with pytest.raises(ValueError, match=f"a model or draft head is a name or a path, got {wrong[-1]!r}"):
            LLM(*wrong)
    with pytest.raises(TypeError, match="LLM has no option paeg_size; options of the engine are: max_running_requests, "):
        LLM(model, paeg_size=3)


def test_a_wrong_head_is_found_before_the_target_is_loaded(tmp_path, monkeypatch):
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded first")

    monkeypatch.setattr("jaxspec.load.load_target", loaded)
    model = write_target(tmp_path / "target", tiny_target())
    head = write_head(tmp_path / "head", random_head(tiny_target(vocab_size=256).config))
    with pytest.raises(ValueError, match="its vocab_size is 256, the target's 128"):
        LLM(model, head)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["import os", None], None, "prompt 1: a prompt must be a string or a list of token ids, got None"),
        (["a", "b"], [SamplingParams(max_tokens=1), 3], "prompt 1: .*SamplingParams"),
        (["a", "b"], {"max_new_tokens": 3}, "max_tokens"),
        (["a", "b"], 5, "^sampling_params must be SamplingParams or a mapping .*, got 5"),
        ("a", "temperature", "^sampling_params must be SamplingParams or a mapping .*, got 'temperature'"),
        ([[5.9, 6.2]], None, "a prompt must be a string or a list of token ids"),
        ({"prompt": "import os"}, None, "a prompt must be a string or a list of token ids"),
        (b"import os", None, "a prompt must be a string or a list of token ids, got b'import os'"),
        (bytearray(b"a"), None, r"a prompt must be a string or a list of token ids, got bytearray\(b'a'\)"),
        (["import os", b"a"], None, "prompt 1: a prompt must be a string or a list of token ids, got b'a'"),
        (None, None, "a prompt must be a string or a list of token ids, got None"),
        (5, None, "a prompt must be a string or a list of token ids, got 5"),
        ([[True]], None, r"a prompt must be a string or a list of token ids, got \[True\]"),
    ],
)
def test_a_wrong_prompt_leaves_the_model_usable(fast, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        fast.generate(prompts, params)
    short = SamplingParams(max_tokens=2, temperature=0)
    assert len(fast.generate((prompt for prompt in ["import os", "def f("]), short)) == 2


def test_the_tokenizers_end_of_sequence_token_ends_texts_too():
    target = tiny_target()
    for token, expected in ((9, (9,)), (None, ()), (target.config.vocab_size, ())):
        assert ending_with(target, SimpleNamespace(eos_token_id=token)).config.eos_token_ids == expected
    assert ending_with(target, None) is target
