"""jaxspec bench: every benchmark is listed, found, and named after itself."""

import re
import subprocess
import sys
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
    assert set(BENCHMARKS) == runnable
    assert all(f"  {name} " in overview() and summary in overview() for name, summary in BENCHMARKS.items())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_its_help_is_its_own(name, capsys):
    assert callable(import_module(f"{PACKAGE}.{name}").main)
    with pytest.raises(SystemExit) as exit:
        main([name, "--help"])
    assert exit.value.code == 0 and capsys.readouterr().out.startswith(f"usage: jaxspec bench {name} ")


def test_arguments_and_status_pass_through_and_errors_are_lines(monkeypatch, capsys):
    def run(arguments: list[str]) -> int:
        if arguments == ["fail"]:
            raise BenchmarkError("no figures")
        return len(arguments)

    monkeypatch.setattr("jaxspec.commands.bench.import_module", lambda name: SimpleNamespace(main=run))
    assert main(["peers", "a", "b", "c"]) == 3
    assert main(["peers", "fail"]) == 2
    assert capsys.readouterr().err == "jaxspec bench peers: error: no figures\n"


def test_an_unknown_benchmark_is_one_line_and_without_one_clients_are_told(capsys):
    assert main(["unknown"]) == 2
    assert "unknown benchmark 'unknown'; benchmarks: speculative, acceptance" in capsys.readouterr().err
    assert main([]) == 0 and all(client in overview() for client in ("sglang.bench_serving", "vllm bench serve", "guidellm run"))


AS_INSTALLED = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
folder = sys.argv[1]
spec = spec_from_file_location("jaxspec.bench", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["jaxspec.bench"] = module_from_spec(spec)
from jaxspec.commands import bench
from jaxspec.bench import options, report, start
from jaxspec.bench.gpu import command
assert bench.PACKAGE == "jaxspec.bench" and "benchmarks" not in sys.modules
options = start.parse([])
assert str(options.out) == "start.jsonl" and options.command == "jaxspec bench start"
assert not report.MARKDOWN and "jaxspec.bench.gpu.worker" in command.COMMAND[-1]
"""


def test_an_installed_package_has_another_name_and_writes_nothing_into_itself(tmp_path):
    """A wheel installs benchmarks/ as jaxspec.bench (setup.py)."""
    run = subprocess.run([sys.executable, "-c", AS_INSTALLED, str(FOLDER)], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not [path for path in FOLDER.rglob("*.py") if re.search(r"^ *(from|import) benchmarks", path.read_text(), re.MULTILINE)]
