"""The command line: what is taken, what is refused, and that asking for help is instant."""

import subprocess
import sys

import pytest

from jaxspec.config import SpecConfig
from jaxspec.server.arguments import parse_arguments


def test_without_flags_the_built_in_model_is_served():
    arguments = parse_arguments([])
    assert (arguments.model, arguments.draft, arguments.spec, arguments.engine) == (None, None, None, {})
    assert (arguments.host, arguments.port, arguments.dtype) == ("127.0.0.1", 30000, "auto")
    assert arguments.given == {}


def test_every_flag_arrives():
    command = """--model-path m --speculative-algorithm eagle3 --speculative-draft-model-path d --speculative-num-steps 3
        --speculative-eagle-topk 2 --speculative-num-draft-tokens 6 --host 0.0.0.0 --port 8000 --dtype bfloat16
        --context-length 512 --page-size 8 --chunked-prefill-size 64 --max-running-requests 3 --mem-fraction-static 0.5
        --random-seed 9 --log-level WARNING --served-model-name name --speculative-token-map freq.pt"""
    arguments = parse_arguments(command.split())
    assert (arguments.model, arguments.draft, arguments.spec) == ("m", "d", SpecConfig(3, 2, 6))
    assert (arguments.algorithm, arguments.token_map) == ("EAGLE3", "freq.pt")
    assert (arguments.host, arguments.port, arguments.dtype, arguments.log_level) == ("0.0.0.0", 8000, "bfloat16", "warning")
    assert arguments.served_model_name == "name"
    assert arguments.engine == {
        "context_length": 512,
        "page_size": 8,
        "prefill_chunk": 64,
        "max_running_requests": 3,
        "mem_fraction": 0.5,
        "random_seed": 9,
    }
    assert len(arguments.given) == 18


@pytest.mark.parametrize(
    ("command", "spec"),
    [
        ("--model m", None),  # what the model comes with decides
        ("--model m --speculative-algorithm none", SpecConfig(num_steps=0)),
        ("--speculative-algorithm NONE", SpecConfig(num_steps=0)),
        ("--speculative-algorithm EAGLE3", None),
        ("--model m --speculative-draft-model-path d", None),
        ("--speculative-num-steps 0", SpecConfig(num_steps=0)),
        ("--speculative-num-steps 4 --speculative-eagle-topk 1", SpecConfig(4, 1, 5)),
    ],
)
def test_the_draft_tree(command: str, spec: SpecConfig | None):
    assert parse_arguments(command.split()).spec == spec


def test_a_changed_tree_is_told():
    command = "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 9"
    arguments = parse_arguments(command.split())
    assert arguments.spec == SpecConfig(4, 1)
    [warning] = arguments.warnings
    assert "num_draft_tokens=9 becomes" in warning


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--nope", "--nope"),
        ("--model-pat x", "--model-pat"),  # no abbreviations: they would change meaning when flags are added
        ("--speculative-algorithm ngram", "NGRAM is not there yet"),
        ("--speculative-algorithm banana", "'banana'"),
        ("--speculative-algorithm NONE --speculative-draft-model-path d", "--speculative-draft-model-path"),
        ("--speculative-algorithm NONE --speculative-num-steps 3", "--speculative-num-steps"),
        ("--speculative-algorithm NONE --speculative-token-map f.pt", "--speculative-token-map"),
        ("--speculative-num-steps 3", "missing: topk, num_draft_tokens"),
        ("--speculative-num-steps 2 --speculative-eagle-topk 2 --speculative-num-draft-tokens 99", "num_draft_tokens=99"),
        ("--page-size 0", "--page-size must be at least 1"),
        ("--chunked-prefill-size -1", "--chunked-prefill-size must be at least 1"),
        ("--max-running-requests 0", "--max-running-requests"),
        ("--mem-fraction-static 1.5", "--mem-fraction-static"),
        ("--context-length 1", "--context-length"),
        ("--context-length long", "--context-length"),
        ("--dtype int8", "--dtype"),
        ("--port 65536", "--port"),
        ("--port http", "--port"),
        ("--log-level loud", "--log-level"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(command: str, said: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as end:
        parse_arguments(command.split())
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line and line.startswith("python -m jaxspec.serve: error: ")


def test_help_loads_no_jax():
    code = (
        "import sys; import jaxspec.server.arguments, jaxspec.serve; print({'jax', 'transformers', 'fastapi'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
    shown = subprocess.run([sys.executable, "-m", "jaxspec.serve", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0
    assert "--speculative-num-draft-tokens" in shown.stdout
