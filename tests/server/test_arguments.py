"""The command line: what is taken, what is refused, and that asking for help is instant."""

import subprocess
import sys
from dataclasses import fields

import pytest

from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.server.arguments import _FLAGS, in_flags, parse_arguments


def test_without_flags_the_built_in_model_is_served():
    arguments = parse_arguments([])
    assert (arguments.model, arguments.draft, arguments.spec) == (None, None, None)
    assert arguments.engine == {"max_waiting_requests": 1024}
    assert (arguments.host, arguments.port, arguments.dtype) == ("127.0.0.1", 30000, "auto")
    assert arguments.given == {}


def test_every_flag_arrives():
    command = """--model-path m --speculative-algorithm eagle3 --speculative-draft-model-path d --speculative-num-steps 3
        --speculative-eagle-topk 2 --speculative-num-draft-tokens 6 --host 0.0.0.0 --port 8000 --dtype bfloat16
        --context-length 512 --page-size 8 --chunked-prefill-size 64 --max-running-requests 3 --mem-fraction-static 0.5
        --random-seed 9 --log-level WARNING --served-model-name name --speculative-token-map freq.pt --disable-radix-cache
        --max-queued-requests 7 --speculative-adaptive --speculative-draft-window-size 100 --speculative-draft-sink-size 4
        --speculative-accept-threshold-single 0.5 --speculative-accept-threshold-acc 0.25 --max-total-tokens 1003"""
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
        "prefix_cache": False,
        "max_waiting_requests": 7,
        "adaptive": True,
        "draft_window_size": 100,
        "draft_sink_size": 4,
        "accept_threshold_single": 0.5,
        "accept_threshold_acc": 0.25,
        "num_pages": 125,  # of 8 tokens
    }
    assert len(arguments.given) == 26
    assert EngineConfig(**arguments.engine).is_lossy


def test_the_cache_is_counted_in_tokens():
    assert parse_arguments(["--max-total-tokens", "1000"]).engine["num_pages"] == 1000 // EngineConfig().page_size


def test_lossy_is_written_in_capitals(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    assert capsys.readouterr().out.count("LOSSY") == 2


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("prefill_chunk must be at least 1, got 0", "--chunked-prefill-size must be at least 1, got 0"),
        ("lower max_tokens or raise num_pages", "lower max_tokens or raise --max-total-tokens"),
        ("3 wait and max_waiting_requests is 3", "3 wait and --max-queued-requests is 3"),
        (
            "draft_sink_size (5) needs a draft_window_size",
            "--speculative-draft-sink-size (5) needs a --speculative-draft-window-size",
        ),
        ("accept_threshold_acc must be in (0, 1]", "--speculative-accept-threshold-acc must be in (0, 1]"),
        ("lower context_length, or raise mem_fraction", "lower --context-length, or raise --mem-fraction-static"),
        ("my_page_size stays, pages too", "my_page_size stays, pages too"),
    ],
)
def test_messages_of_the_engine_in_flags(message: str, flags: str):
    assert in_flags(message) == flags


def test_every_setting_has_a_flag_or_a_reason():
    """A new field of EngineConfig must not be forgotten."""
    without = {"prefix_cache", "adaptive", "num_pages"}  # --disable-radix-cache, --speculative-adaptive, --max-total-tokens
    without |= {"overlap"}  # only tests need the plain loop
    assert {field.name for field in fields(EngineConfig)} == set(_FLAGS) | without


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
        ("--speculative-algorithm NONE --speculative-adaptive", "--speculative-adaptive has no use"),
        ("--speculative-algorithm NONE --speculative-draft-window-size 9", "--speculative-draft-window-size has no use"),
        ("--speculative-algorithm NONE --speculative-accept-threshold-acc 0.5", "--speculative-accept-threshold-acc has no use"),
        ("--speculative-accept-threshold-single 0", "--speculative-accept-threshold-single must be in (0, 1]"),
        ("--speculative-accept-threshold-acc 1.5", "--speculative-accept-threshold-acc must be in (0, 1]"),
        ("--speculative-draft-window-size 0", "--speculative-draft-window-size must be at least 1"),
        ("--speculative-draft-sink-size 4", "(4) needs a --speculative-draft-window-size"),
        ("--max-queued-requests 0", "--max-queued-requests must be at least 1"),
        ("--max-total-tokens 15", "--max-total-tokens must be at least one page, 16 tokens, got 15"),
        ("--max-total-tokens -5 --page-size 1", "--max-total-tokens must be"),
        ("--page-size 0 --max-total-tokens 5", "--page-size must be at least 1"),
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
