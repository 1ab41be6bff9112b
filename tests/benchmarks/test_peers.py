"""The comparison with other engines, without any of them: their sides are fakes that speak the same protocol. Ours mostly, too."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from benchmarks import peers
from benchmarks.options import BenchmarkError
from benchmarks.peer_models import Models
from benchmarks.peer_process import KINDS, SIDES, Kind, NotRun, Peer, one_line
from benchmarks.peer_tables import tables
from benchmarks.peers import Contender, main, measure, summarize
from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.commands.common import run_guarded
from jaxspec.testing import random_eagle, tiny_target, write_head, write_target

PROMPTS = [[5, 9, 17], [40, 2]]
KNOWN_TOKENS = {(5, 9, 17): (7, 3, 3, 1, 9, 4), (40, 2): (8, 8, 2, 6, 5, 1)}
START = f"import json, os, sys\nsys.path.insert(0, {str(SIDES.parent)!r})\nfrom peer_sides import LOOKUP, PLAIN, serve\n"
KNOWN = """
known = {tuple(prompt): tokens for prompt, tokens in json.loads(open(%r).read())}
def right(prompt, max_tokens):
    print("a library that talks")
    os.write(1, b"and one below Python\\n")
    return known[tuple(prompt)][:max_tokens]
"""
GOOD = "serve(['numpy'], lambda task: {PLAIN: {'': right}, LOOKUP: {f'{n} tokens': right for n in task.lookups}})"
WRONG = "serve(['numpy'], lambda task: {PLAIN: {'': lambda prompt, n: [0] + right(prompt, n)[1:]}})"
SHORT = "serve(['numpy'], lambda task: {PLAIN: {'': lambda prompt, n: right(prompt, n)[:-1]}})"
MISSING = "serve(['no-such-package|nor-this'], None)"
MISSING_LATER = "def load(task): import no_such_module\nserve(['numpy'], load)"
BROKEN = "def load(task): raise ValueError(f'no {task.model}/config.json')\nserve(['numpy'], load)"
DIES_LOADING = "def load(task): print('out of luck'); sys.stdout.flush(); os._exit(3)\nserve(['numpy'], load)"
DIES_LATER = """
calls = []
def dies(prompt, n):
    calls.append(prompt)
    return right(prompt, n) if len(calls) < 4 else os._exit(4)
serve(['numpy'], lambda task: {PLAIN: {'': dies}})
"""
ONE_WAY_FAILS = """
def fails(prompt, n): raise RuntimeError('no compiler')
serve(['numpy'], lambda task: {PLAIN: {'compiled': fails, 'eager': right}, LOOKUP: {'a': fails, 'b': fails}})
"""


NO_EIGHT_BITS = """
def load(task):
    if task.precision == 'int8': raise NotImplementedError('it has no 8 bits')
    return {PLAIN: {task.precision: lambda prompt, n: [0] * n}}
serve(['numpy'], load)
"""
GGUF = "serve(['numpy'], lambda task: {PLAIN: {os.path.basename(task.model): lambda prompt, n: [0] * n}})"


def contender(engine: str, mode: str = "", way: str = "", precision: str = "float32", weights: str = "float32", generate=None):
    return Contender(engine, mode, precision, weights, way, generate or (lambda prompts: (1.0, [[1]])))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder with the tokens that engines should give, and options for a tiny model and two prompts."""
    directory = tmp_path_factory.mktemp("peers")
    target = tiny_target(num_layers=2, intermediate_size=64)
    path = write_target(directory / "target", target)
    names = [*map(chr, range(256, 383)), "ĀĀ"]
    tokenizer = Tokenizer(BPE({name: number for number, name in enumerate(names)}, [("Ā", "Ā")]))
    tokenizer.save(str(path / "tokenizer.json"))
    (directory / "known.json").write_text(json.dumps([[prompt, list(tokens)] for prompt, tokens in KNOWN_TOKENS.items()]))
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": prompt}) + "\n" for prompt in PROMPTS))
    return directory, [
        *("--model", str(path), "--draft", str(write_head(directory / "head", random_eagle(target.config)))),
        *("--prompts", str(prompts), "--max-tokens", "6", "--tree", "1/1/2", "--rounds", "2", "--drafts", "head"),
    ]


class NoWorkbench:
    """Stands for our loaded model."""

    def __init__(self, model, head, **how):
        self.models = SimpleNamespace(head=head)
        self.ask, self.encode = (lambda prompts, _: prompts), (lambda prompts, **_: [list(each) for each in prompts])
        self.context_for = lambda prompts, max_tokens: 256


def no_engine(bench, drafts, weights, context, max_tokens) -> Contender:
    """Stands for our engine."""
    return contender("jaxspec", str(drafts), "", weights.precision, weights.name, lambda prompts: (1.0, known(prompts)))


def known(prompts) -> list[list[int]]:
    return [list(KNOWN_TOKENS[tuple(prompt)]) for prompt in prompts]


@pytest.fixture
def compare(model, tmp_path, monkeypatch):
    """Runs the benchmark against fake engines by name; returns its status and record, or None. `real`: with our own engine."""
    directory, options = model

    def run(fakes: dict[str, str], *more: str, real: bool = False) -> tuple[int, dict | None]:
        kinds = [kind(name, code) for name, code in fakes.items()]
        monkeypatch.setattr(peers, "KINDS", kinds)
        if not real:
            monkeypatch.setattr(peers, "Workbench", NoWorkbench)
            monkeypatch.setattr(peers, "ours", no_engine)
        out = tmp_path / "out.jsonl"
        status = run_guarded("bench", lambda: main([*options, "--peers", *fakes, "--out", str(out), *more]))
        return status, json.loads(out.read_text())["results"] if out.exists() else None

    def kind(name: str, code: str) -> Kind:
        script = tmp_path / f"{name}.py"
        script.write_text(START + KNOWN % str(directory / "known.json") + code)
        return next(each for each in KINDS if each.name == name)._replace(script=str(script))

    return run


@pytest.mark.exhaustive
def test_our_own_engine_runs_in_every_way(compare):
    status, results = compare({"llama.cpp": GGUF}, "--precision", "int8", "--rounds", "1", real=True)
    assert status == 0 and results is not None
    found = {each["name"]: each for each in results["contenders"] if each["engine"] == "jaxspec"}
    assert list(found) == [f"jaxspec {mode}, {weights}" for weights in ("int8", "Q8_0") for mode in ("plain", "1/1/2")]
    assert all(each["equal_to_reference"] == 2 and each["tokens"] == 12 for each in found.values())


def test_everybody_is_measured_against_transformers(compare, capsys):
    status, results = compare({"transformers": GOOD, "llama.cpp": WRONG, "ctranslate2": SHORT})
    assert status == 0 and results is not None
    by_name = {each["name"]: each for each in results["contenders"]}
    assert list(by_name) == [
        "jaxspec plain, float32",
        "jaxspec 1/1/2, float32",
        "transformers, float32",
        "transformers, prompt lookup, float32",
        "llama.cpp, F32",
        "ctranslate2, float32",
    ]
    assert {name: each["equal_to_reference"] for name, each in by_name.items()} == dict.fromkeys(by_name, 2) | {
        "llama.cpp, F32": 0,
        "ctranslate2, float32": 0,
    }
    short = by_name["ctranslate2, float32"]
    assert short["tokens"] == 10 and short["tokens_asked"] == 12
    for each in results["contenders"]:
        theirs = by_name["transformers, float32"]["seconds"]
        assert each["ratio_to_baseline"]["values"] == [theirs[0] / each["seconds"][0], theirs[1] / each["seconds"][1]]
    assert by_name["transformers, prompt lookup, float32"]["way"] in ("5 tokens", "10 tokens")
    assert results["not_run"] == {} and set(results["versions"]["llama.cpp"]) == {"numpy", "python"}
    printed = capsys.readouterr().out
    assert tables(results)["peers"] in printed and "times transformers, float32, median (min..max of 2)" in printed
    assert "10 tokens instead of 12" in printed and tables(results)["best"] in printed


@pytest.mark.variants
def test_a_missing_package_is_listed_and_the_others_go_on(compare, capsys):
    status, results = compare({"transformers": MISSING, "llama.cpp": GOOD, "ctranslate2": MISSING_LATER})
    assert status == 0 and results is not None
    assert results["not_run"] == {
        "transformers": "no-such-package or nor-this is not installed: pip install torch transformers",
        "ctranslate2, float32": "No module named 'no_such_module': pip install torch transformers ctranslate2",
    }
    assert results["baseline"] == "jaxspec plain, float32" and set(results["versions"]) == {"llama.cpp"}
    assert set(tables(results)["not run"].splitlines()[2].split(" | ")[0].split()) == {"|", "transformers"}
    assert "times jaxspec plain, float32 (transformers was not run)" in capsys.readouterr().out


@pytest.mark.variants
@pytest.mark.parametrize("code", [MISSING, MISSING_LATER], ids=["at the start", "when it loads"])
def test_with_nobody_left_it_says_what_to_install(compare, capsys, code):
    assert compare({"transformers": code, "llama.cpp": MISSING}) == (2, None)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bench: error")]
    assert "pip install torch transformers" in line and "pip install xllamacpp" in line and "--peer-python" in line


@pytest.mark.variants
def test_whoever_dies_or_fails_is_out(compare):
    fakes = {"transformers": GOOD, "openvino-genai": BROKEN, "llama.cpp": DIES_LOADING, "ctranslate2": DIES_LATER}
    status, results = compare(fakes)
    assert status == 0 and results is not None
    assert [each["engine"] for each in results["contenders"]] == ["jaxspec", "jaxspec", "transformers", "transformers"]
    assert results["not_run"] == {
        "openvino-genai, float32": "ValueError: no config.json",
        "llama.cpp, float32": "its process ended with status 3 (out of luck)",
        "ctranslate2, float32": "its process ended with status 4 (and one below Python)",
    }


@pytest.mark.variants
def test_a_way_that_fails_leaves_the_others(compare):
    status, results = compare({"transformers": ONE_WAY_FAILS})
    assert status == 0 and results is not None
    assert [each["way"] for each in results["contenders"]] == ["", "", "eager"]
    assert results["not_run"] == {"transformers, prompt lookup, float32": "RuntimeError: no compiler"}


@pytest.mark.variants
def test_every_precision_is_compared_with_our_own(compare):
    status, results = compare({"transformers": NO_EIGHT_BITS, "llama.cpp": GGUF}, "--precision", "float32", "int8")
    assert status == 0 and results is not None
    by_name = {each["name"]: each for each in results["contenders"]}
    references = {name: each["reference"] for name, each in by_name.items()}
    assert references == {
        "jaxspec plain, float32": "jaxspec plain, float32",
        "jaxspec 1/1/2, float32": "jaxspec plain, float32",
        "transformers, float32": "jaxspec plain, float32",
        "llama.cpp, F32": "jaxspec plain, float32",
        "jaxspec plain, int8": "jaxspec plain, int8",
        "jaxspec 1/1/2, int8": "jaxspec plain, int8",
        "jaxspec plain, Q8_0": "jaxspec plain, Q8_0",
        "jaxspec 1/1/2, Q8_0": "jaxspec plain, Q8_0",
        "llama.cpp, Q8_0": "jaxspec plain, Q8_0",
    }
    assert all(each["equal_to_reference"] == 2 for name, each in by_name.items() if name.startswith("jaxspec"))
    assert by_name["llama.cpp, Q8_0"]["way"] == "Q8_0.gguf" and results["baseline"] == "transformers, float32"
    assert results["not_run"] == {"transformers, int8": "it has no 8 bits"}


def test_rows_without_whole_blocks_are_a_reason(tmp_path):
    target = write_target(tmp_path / "target", tiny_target(num_layers=1, intermediate_size=48))
    Tokenizer(BPE({}, [])).save(str(target / "tokenizer.json"))
    with pytest.raises(NotRun, match="its GGUF file can't be written: Can't quantize"):
        Models(target, tmp_path).gguf("int4")


def test_a_gguf_file_is_its_own_precision_and_written_for_others(model, tmp_path):
    """The file's values, dequantised, are those of the directory that other engines read."""
    first, second = Models(model[0] / "target", tmp_path / "first"), tmp_path / "second"
    first.directory.mkdir(), second.mkdir()
    file = first.gguf("int8")
    models = Models(file.directory, second)
    assert models.gguf("int8").path.samefile(file.path) and first.hugging_face == model[0] / "target"
    assert [each.name for each in models.ours("int8")] == ["int8", "Q8_0"] and not list(second.iterdir())
    with (
        Checkpoint(file.directory) as own,
        Checkpoint(models.hugging_face) as other,
        Checkpoint(models.gguf("float32").directory) as again,
    ):
        for name in own.infos:
            assert np.array_equal(own.read(name), other.read(name)) and np.array_equal(own.read(name), again.read(name))


def test_the_faster_way_is_taken(monkeypatch):
    seconds = {"cold": iter([1.0, 9.0, 9.0]), "warm": iter([30.0, 8.0, 8.0])}
    peer = object.__new__(Peer)
    monkeypatch.setattr(peer, "generate", lambda _, way: (next(seconds[way]), []))
    assert peer.fastest(["cold", "warm"], [[1]]) == "warm"  # the first pass does not count


def test_tokens_are_compared_with_the_same_weights_or_else_the_same_precision():
    def of(engine: str, weights: str, precision: str = "int4", token: int = 1) -> Contender:
        return contender(engine, "plain" if engine == "jaxspec" else "", "", precision, weights, lambda _: (1.0, [[token]]))

    everybody = [
        *(of("jaxspec", "float32", "float32", 7), of("jaxspec", "int4", token=8), of("jaxspec", "Q4_1", token=9)),
        *(of("llama.cpp", "Q4_1", token=9), of("openvino-genai", "int4", token=8), of("llama.cpp", "float32", "float32", 6)),
    ]
    results = summarize(everybody, measure(everybody, [[5]], 1)[0], 1)
    shown = [each["reference"].split(", ")[1] for each in results["contenders"]]
    assert shown == ["float32", "int4", "Q4_1", "Q4_1", "int4", "float32"]
    assert [each["equal_to_reference"] for each in results["contenders"]] == [1, 1, 1, 1, 1, 0]


def test_whoever_fails_in_a_timed_round_has_no_figures():
    left = [1.0, 1.0]

    def fails_in_the_second_round(prompts):
        if not left:
            raise NotRun("gone")
        return left.pop(), [[1]]

    everybody = [contender("jaxspec", "plain"), contender("llama.cpp", generate=fails_in_the_second_round)]
    runs, not_run = measure(everybody, [[5]], 2)
    assert list(runs) == ["jaxspec plain, float32"] and not_run == {"llama.cpp, float32": "gone"}


def test_everybody_runs_a_prompt_before_anybody_runs_the_next():
    order = []

    def runs(engine: str) -> Contender:
        def generate(prompts):
            order.append((engine, prompts[0][0]))
            return 1.5, [[prompts[0][0]]]

        return contender(engine, generate=generate)

    measured, _ = measure([runs("a"), runs("b")], [[7], [8], [9]], 1)
    once = [("a", 7), ("b", 7), ("b", 8), ("a", 8), ("a", 9), ("b", 9)]
    assert order == once * 2  # the first round is not timed
    assert measured == {name: [[(1.5, [[7]]), (1.5, [[8]]), (1.5, [[9]])]] for name in ("a, float32", "b, float32")}


def test_speeds_by_kind_of_text():
    everybody = [contender("jaxspec", "plain"), contender("llama.cpp")]
    seconds = {everybody[0].name: [1.0, 2.0, 3.0], everybody[1].name: [1.0, 4.0, 1.0]}
    runs = {name: [[(each, [[1, 2]]) for each in several]] for name, several in seconds.items()}
    results = summarize(everybody, runs, 2, ["code", "prose", "code"])
    assert [each["by_kind"]["code"]["median"] for each in results["contenders"]] == [1.0, 2.0]
    lines = tables({**results, "not_run": {}, "versions": {}})["kinds"].splitlines()
    assert [line.split("|")[3:5] for line in lines[2:]] == [["    1 ", "     1 "], ["    2 ", "     0 "]]


def test_a_wrong_round_counts_even_if_others_are_right():
    everybody = [contender("jaxspec", "plain"), contender("llama.cpp")]
    runs = {everybody[0].name: [[(1.0, [[1, 2]])]] * 2, everybody[1].name: [[(1.0, [[1, 2]])], [(1.0, [[1, 3]])]]}
    assert summarize(everybody, runs, 2)["contenders"][1]["equal_to_reference"] == 0


def test_a_python_that_is_not_there_is_one_line():
    with pytest.raises(NotRun, match="its Python does not start: No such file"):
        Peer(KINDS[0], "/no/such/python")


@pytest.mark.parametrize("text", ["ctranslate2", "nobody=/usr/bin/python", "ctranslate2="])
def test_a_wrong_peer_python_is_one_line(text, capsys):
    with pytest.raises(SystemExit) as exit:
        peers.parse(["--peer-python", text])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and "NAME=PYTHON" in error


def test_help_says_what_to_install(capsys):
    with pytest.raises(SystemExit):
        peers.parse(["--help"])
    printed = capsys.readouterr().out
    assert all(f"pip install {kind.install}" in printed for kind in KINDS) and "Examples:" in printed


def test_messages_are_short_and_without_places():
    assert (
        one_line("can't read\n'/home/me/model/config.json' | 3/1/4, http://a.b/c")
        == "can't read 'config.json' / 3/1/4, http://a.b/c"
    )
    assert len(one_line("x" * 999)) == 200


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_side_starts_and_says_its_versions_or_what_is_missing(kind):
    peer = Peer(kind, sys.executable)
    try:
        assert "python" in peer.versions()
    except BenchmarkError as error:
        assert f"is not installed: pip install {kind.install}" in str(error)
    finally:
        peer.close()


BUSY = """
import subprocess, threading
child = subprocess.Popen([sys.executable, '-c', 'while True: pass'])
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
serve(['numpy'], lambda task: {PLAIN: {str(child.pid): right}})
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc: needs Linux")
def test_a_peer_takes_no_time_while_others_run(model, tmp_path):
    script = tmp_path / "busy.py"
    script.write_text(START + KNOWN % str(model[0] / "known.json") + BUSY)
    peer = Peer(KINDS[0]._replace(script=str(script)), sys.executable)
    try:
        ((child,),) = peer.load(model="", precision="int8", threads=1, lookups=[], context=8).values()
        assert becomes(peer.process.pid, "T") and becomes(int(child), "T")
        seconds, tokens = peer.generate(PROMPTS[:1], precision="int8", contender="plain", way=child, max_tokens=6)
        assert seconds > 0 and len(tokens[0]) == 6 and becomes(int(child), "T")
    finally:
        peer.close()
    assert becomes(int(child), None, "Z", "X")


def becomes(process: int, *states: str | None) -> bool:
    """Whether a process soon is in one of these states: T stopped, Z ended, None gone. A signal takes a moment."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            state = None
        if state in states:
            return True
        time.sleep(0.05)
    return False
