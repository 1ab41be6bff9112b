"""jaxspec bench: every benchmark is listed, found, and named after itself."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.options import BenchmarkError
from jaxspec.commands.bench import BENCHMARKS, PACKAGE, main, overview

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_every_benchmark_is_in_the_list():
    runnable = {path.stem for path in FOLDER.glob("*.py") if "    exit_on_error(" in path.read_text()}
    runnable |= {path.parent.name for path in FOLDER.glob("*/__main__.py")}
    assert {benchmark.module for benchmark in BENCHMARKS} == {f"{PACKAGE}.{name}" for name in runnable}
    assert all(f"  {benchmark.name} " in overview() and benchmark.summary in overview() for benchmark in BENCHMARKS)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_its_help_is_its_own(benchmark, capsys):
    assert callable(import_module(benchmark.module).main)
    with pytest.raises(SystemExit) as exit:
        main([benchmark.name, "--help"])
    assert exit.value.code == 0 and capsys.readouterr().out.startswith(f"usage: jaxspec bench {benchmark.name} ")


def test_arguments_and_status_pass_through_and_errors_are_lines(monkeypatch, capsys):
    def run(arguments: list[str]) -> int:
        if arguments == ["fail"]:
            raise BenchmarkError("no figures")
        return len(arguments)

    monkeypatch.setattr("jaxspec.commands.bench.import_module", lambda name: SimpleNamespace(main=run))
    assert main(["peers", "a", "b", "c"]) == 3
    assert main(["peers", "fail"]) == 2
    assert capsys.readouterr().err == "jaxspec bench peers: error: no figures\n"


def test_an_unknown_benchmark_is_one_line(capsys):
    assert main(["unknown"]) == 2
    assert "unknown benchmark 'unknown'; benchmarks: speculative, throughput" in capsys.readouterr().err


def test_the_standard_clients_are_told():
    assert main([]) == 0
    assert all(client in overview() for client in ("sglang.bench_serving", "vllm bench serve", "guidellm run"))
