"""Traced programs on disk: found again by whoever would trace the same, by nobody else, and never in the way."""

import logging
import os
import subprocess
import sys
import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxspec.decoding.block_drafter import BlockState
from jaxspec.decoding.head_drafter import HeadState
from jaxspec.decoding.programs import AdmitProgram, CatchUpProgram, CycleProgram, PrefillProgram, ProposeProgram, SettleProgram
from jaxspec.engine import program_cache
from jaxspec.engine.program_cache import APART, KEEP_DAYS, StoredTraces, source_digest
from jaxspec.engine.request import GenerationRequest
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import tiny_engine
from jaxspec.tree_shape import PLAIN, TreeShape
from jaxspec.typing import KeysValues
from tests.engine.served import served

pytestmark = pytest.mark.compiles

WEIGHTS = {"layers": {0: jnp.arange(3.0), 1: jnp.ones(3)}}
STATE = HeadState((KeysValues(jnp.zeros(3), jnp.ones(3)),), (), ())


def program(weights, state, factor):
    return jax.tree.map(lambda array: array + factor * weights["layers"][0], state)


def never(*_):
    pytest.fail("it was traced")


def files(directory):
    return sorted(directory.glob("*.stablehlo"))


@pytest.mark.parametrize("state", [STATE, BlockState(STATE.cache, ())])
def test_what_was_stored_is_not_traced_again_and_does_the_same(tmp_path, state):
    arguments = (WEIGHTS, state, jnp.float32(2))
    first = StoredTraces(tmp_path / "new", "me").get("name", program, arguments)
    again = StoredTraces(tmp_path / "new", "me").get("name", never, arguments)
    expected = program(*arguments)
    for stored in (first, again):
        result = jax.jit(stored)(*arguments)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        assert all(map(jnp.array_equal, jax.tree.leaves(result), jax.tree.leaves(expected)))
    [file] = (tmp_path / "new").iterdir()
    assert [file] == files(tmp_path / "new")
    (tmp_path / "ordinary").touch()
    assert file.stat().st_mode == (tmp_path / "ordinary").stat().st_mode  # others may read it


def test_the_state_is_still_updated_in_place(tmp_path):
    stored = StoredTraces(tmp_path, "me").get("name", program, (WEIGHTS, STATE, jnp.float32(2)))
    state = jax.tree.map(jnp.copy, STATE)
    compiled = jax.jit(stored, donate_argnums=1).lower(WEIGHTS, state, jnp.float32(2)).compile()
    compiled(WEIGHTS, state, jnp.float32(2))
    assert all(array.is_deleted() for array in jax.tree.leaves(state))


@pytest.mark.parametrize("changed", ["owner", "name", "shape", "dtype", "structure", "source", "version", "setting"])
def test_whatever_may_change_the_program_gives_it_another_name(tmp_path, changed, monkeypatch):
    def double(weights, state, factor):
        return state, factor * 2

    StoredTraces(tmp_path, "me").get("name", double, (WEIGHTS, STATE, jnp.ones(4)))
    last = {"shape": jnp.ones(5), "dtype": jnp.ones(4, jnp.int32), "structure": (jnp.ones(4),)}.get(changed, jnp.ones(4))
    if changed == "source":
        monkeypatch.setattr(program_cache, "source_digest", lambda: "other")
    if changed == "version":
        monkeypatch.setattr(program_cache, "LIBRARIES", ("jax", "pytest"))
    with jax.default_matmul_precision("float32") if changed == "setting" else jax.named_scope("nothing"):
        traces = StoredTraces(tmp_path, "you" if changed == "owner" else "me")
        traces.get("other" if changed == "name" else "name", lambda weights, state, factor: state, (WEIGHTS, STATE, last))
    assert len(files(tmp_path)) == 2


def test_the_source_is_that_of_all_files_that_can_matter(tmp_path):
    assert source_digest() == source_digest()
    (tmp_path / "jaxspec/decoding").mkdir(parents=True)
    (tmp_path / "jaxspec/server").mkdir()
    digests = [source_digest(tmp_path)]
    for name in ("jaxspec/a.py", "jaxspec/decoding/b.py", "jaxspec/a.py", "other.py", "jaxspec/server/c.py"):
        (tmp_path / name).write_text(f"{len(digests)}")
        digests.append(source_digest(tmp_path))
    assert len(set(digests)) == 4 and digests[3] == digests[4] == digests[5]


def test_the_engine_knows_nothing_of_what_is_left_out():
    imports = "import sys, jaxspec.engine.engine, jaxspec.checkpoints.loading"
    names = "print(*(name for name in sys.modules if name.startswith('jaxspec.')))"
    loaded = subprocess.run(
        [sys.executable, "-c", f"{imports}; {names}"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "jaxspec.engine.engine" in loaded and not [name for name in loaded if name.split(".")[1] in APART]


class Unknown(NamedTuple):
    """Nobody told JAX how to store it."""

    value: jax.Array


def test_what_can_not_be_stored_is_traced_every_time(tmp_path, caplog):
    def unstorable(value):
        return Unknown(value + 1)

    traces = StoredTraces(tmp_path, "me")
    for _ in range(3):
        assert traces.get("name", unstorable, (jnp.ones(2),)) is unstorable
    assert not files(tmp_path)
    [record] = caplog.records  # and not one for every program
    assert record.levelno == logging.WARNING and "traced programs are not kept, at least not name: " in record.message


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-1], lambda content: content[:-1] + b"x"])
def test_a_damaged_file_is_replaced(tmp_path, damage, caplog):
    arguments = (WEIGHTS, STATE, jnp.float32(2))
    StoredTraces(tmp_path, "me").get("name", program, arguments)
    [file] = files(tmp_path)
    content = file.read_bytes()
    file.write_bytes(damage(content))
    result = jax.jit(StoredTraces(tmp_path, "me").get("name", program, arguments))(*arguments)
    assert jnp.array_equal(result.cache[0].k, program(*arguments).cache[0].k)
    assert len(file.read_bytes()) == len(content) and not caplog.records
    StoredTraces(tmp_path, "me").get("name", never, arguments)


def test_a_directory_that_can_not_be_written_is_no_obstacle(tmp_path, caplog):
    (tmp_path / "file").touch()
    assert StoredTraces(tmp_path / "file" / "below", "me").get("name", program, (WEIGHTS, STATE, jnp.float32(1))) is program


def test_a_file_that_can_not_be_written_leaves_nothing_behind(tmp_path):
    arguments = (WEIGHTS, STATE, jnp.float32(2))
    StoredTraces(tmp_path, "me").get("name", program, arguments)
    [file] = files(tmp_path)
    file.unlink()
    file.mkdir()
    assert StoredTraces(tmp_path, "me").get("name", program, arguments) is program
    assert list(tmp_path.iterdir()) == [file]


def test_files_that_nobody_needs_any_more_are_removed(tmp_path):
    traces = StoredTraces(tmp_path, "me")
    for name in ("old", "used", "new"):
        traces.get(name, partial(program, WEIGHTS), (STATE, jnp.float32(1)))
    long_ago = time.time() - (KEEP_DAYS + 1) * 24 * 3600
    for file in files(tmp_path):
        os.utime(file, (long_ago, long_ago))
    traces.get("used", never, (STATE, jnp.float32(1)))
    traces.get("newest", partial(program, WEIGHTS), (STATE, jnp.float32(1)))
    StoredTraces(tmp_path, "somebody else")
    assert len(files(tmp_path)) == 2


def test_compiled_programs_that_nobody_needs_any_more_are_removed(tmp_path):
    long_ago, now = time.time() - (KEEP_DAYS + 1) * 24 * 3600, time.time()
    for name, read, written in (("a-cache", long_ago, long_ago), ("b-cache", now, long_ago), ("notes", long_ago, long_ago)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (read, written))
    code = "from jaxspec.engine.program_cache import enable_compilation_cache; print(enable_compilation_cache())"
    environment = os.environ | {"JAXSPEC_COMPILATION_CACHE": str(tmp_path)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(tmp_path) and sorted(each.name for each in tmp_path.iterdir()) == ["b-cache", "notes"]


def test_a_directory_of_compiled_programs_that_can_not_be_made_is_named(tmp_path):
    """And no program in it is called damaged."""
    (tmp_path / "file").touch()
    environment = {**os.environ, "JAXSPEC_COMPILATION_CACHE": str(tmp_path / "file" / "below")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    ended = subprocess.run([sys.executable, "-c", DAMAGED], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "2.0" and "damaged" not in ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("log: ")]
    assert line.startswith("log: compiled programs are not kept: ")
    assert line.endswith("JAXSPEC_COMPILATION_CACHE names another directory")


@pytest.mark.exhaustive
def test_every_kind_of_program_can_be_stored_and_says_the_same(tmp_path, caplog):
    """Also a guard for new fields of what programs return: stored_traces must name their types."""
    results = []
    for traces in (None, StoredTraces(tmp_path, "tiny"), StoredTraces(tmp_path, "tiny")):
        engine = tiny_engine(TreeShape(2, 2, 4), max_running_requests=1, request_trees=(PLAIN,), ngram=True)
        programs = engine.runner.programs
        programs.traces = traces
        params = SamplingParams(max_tokens=12, temperature=0.8, seed=1, logprobs=1)
        (request,) = served(engine, GenerationRequest(list(range(8)), params))
        results.append((request.output, request.logprobs))
        assert {type(program) for program in programs.compilations} == {AdmitProgram, PrefillProgram, CycleProgram}
    assert results[0] == results[1] == results[2]
    pages, tree = engine.runner.table.pages, TreeShape(2, 2, 4)
    others = [CatchUpProgram(1, pages), ProposeProgram(1, pages, tree), SettleProgram(1, pages, tree)]
    for program in others:
        function = programs._function(program)
        arguments = (programs._params, programs.state, *programs.inputs(program))
        assert programs.traces.get(str(program), function, arguments) is not function
    assert len(files(tmp_path)) == len(programs.compilations) + len(others) and not caplog.records


DAMAGED = """
import jax, logging, warnings
from jaxspec.engine.program_cache import enable_compilation_cache, removing_damaged

logging.basicConfig(format="log: %(message)s")
warnings.simplefilter("error")
enable_compilation_cache()
with removing_damaged():
    print(jax.jit(lambda x: x + 1).lower(1.0).compile()(1.0))
"""


@pytest.mark.variants
def test_damaged_programs_of_jaxs_cache_are_replaced(tmp_path):
    """JAX warns of them at every start, for ever."""

    def run() -> tuple[str, str]:
        environment = {**os.environ, "JAXSPEC_COMPILATION_CACHE": str(tmp_path)}
        ended = subprocess.run([sys.executable, "-c", DAMAGED], env=environment, capture_output=True, text=True, timeout=120)
        return ended.stdout.strip(), "\n".join(line for line in ended.stderr.splitlines() if line.startswith("log: "))

    assert run() == ("2.0", "")
    [entry] = tmp_path.glob("jit__lambda*-cache")
    whole = entry.read_bytes()
    other = entry.with_name("jit__lambda-0123-cache")  # a program of the same kind
    other.write_bytes(whole)
    entry.write_bytes(b"damaged")
    assert run() == ("2.0", f"log: removed damaged programs from {tmp_path}: jit__lambda")
    assert not entry.exists() and other.exists()
    assert run() == ("2.0", "")
    assert len(entry.read_bytes()) > len(whole) // 2


def test_nothing_counts_as_damaged_where_jax_can_not_be_asked(tmp_path, monkeypatch):
    (entry := tmp_path / "jit__lambda-0123-cache").write_bytes(b"damaged")
    assert program_cache.is_damaged(entry)
    monkeypatch.delattr("jax._src.compilation_cache.decompress_executable")
    assert not program_cache.is_damaged(entry)
