"""--config: YAML on a par with the command line, which wins."""

from pathlib import Path

import pytest

from jaxspec.config import SpecConfig
from jaxspec.server.arguments import ServerArguments, parse_arguments
from jaxspec.server.config_file import MAX_BYTES

EVERYTHING = """
# names may be written either way
model: some/model
max_running_requests: 4
mem-fraction-static: 0.5
speculative_num_steps: 3
speculative_eagle_topk: 1
disable-radix-cache: true
speculative-adaptive: false
speculative-request-trees: [0, 2/1/3]
cuda-graph-bs: [1, 2]
served-model-name: "yes"
api_key: 0123
"""


def parse(tmp_path: Path, content: str | bytes, *argv: str) -> ServerArguments:
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return parse_arguments([*argv, "--config", str(path)])


def test_every_kind_of_value(tmp_path: Path):
    arguments = parse(tmp_path, EVERYTHING)
    assert (arguments.model, arguments.served_model_name) == ("some/model", "yes")
    assert arguments.engine == {
        "max_running_requests": 4, "mem_fraction": 0.5, "prefix_cache": False, "max_waiting_requests": 1024,
    }  # fmt: skip
    assert arguments.spec == SpecConfig(3, 1)
    assert arguments.request_trees == (SpecConfig(num_steps=0), SpecConfig(2, 1, 3))
    assert arguments.settings.api_key == "0123"  # not the number 83 that YAML takes it for
    assert len(arguments.notes) == 1 and arguments.notes[0].startswith("--cuda-graph-bs has no effect")


def test_the_command_line_wins(tmp_path: Path):
    arguments = parse(tmp_path, EVERYTHING, "other/model", "--max-num-seqs", "9", "--speculative-num-steps=2")
    assert (arguments.model, arguments.spec, arguments.engine["max_running_requests"]) == ("other/model", SpecConfig(2, 1), 9)
    assert arguments.engine["mem_fraction"] == 0.5
    assert parse(tmp_path, EVERYTHING, "--model-path", "other/model").model == "other/model"


def test_vllms_nested_speculation(tmp_path: Path):
    content = "speculative_config:\n  method: eagle3\n  model: head\n  num_speculative_tokens: 3\n"
    arguments = parse(tmp_path, content)
    assert (arguments.algorithm, arguments.draft, arguments.spec) == ("EAGLE3", "head", SpecConfig(3, 1))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("max_runing_requests: 4", "max_runing_requests is no option of a config file: did you mean --max-running-requests?"),
        ("zebra: 4", "zebra is no option of a config file (see"),
        ("config: other.yaml", "config is no option of a config file"),
        ("help: cache", "help is no option of a config file"),
        ("disable-radix-cache: 1", "disable-radix-cache must be true or false, got '1'"),
        ("port: []", "port must be a value, got []"),
        ("port: {a: 1}", "port must be a value, got {'a': '1'}"),
        ("port:", "port must be a value, got ''"),
        ("port: 99999", "argument --port: must be a number from 0 to 65535"),
        ("page_size: 0", "--page-size must be at least 1, got 0"),
        ("[port, 1]", "must hold options, one per line"),
        ("", "must hold options, one per line"),
        ("port: 1\n  host: x", "is not YAML that can be read"),
        ("served-model-name: !!python/object/apply:os.system [exit]\nzebra: 1", "zebra is no option"),
        ("a: &a [x, x]\nb: &b [*a, *a]", "aliases are not supported"),
        (b"port: \xff", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("# " + "x" * MAX_BYTES, f"is larger than {MAX_BYTES} bytes"),
    ],
    ids=range(18),
)
def test_what_is_refused(tmp_path: Path, content: str | bytes, said: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as end:
        parse(tmp_path, content)
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line and line.startswith("python -m jaxspec.serve: error: ") and len(line) < 1000
    assert "config.yaml" in line or said.startswith(("argument", "--page-size"))


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(SystemExit):
            parse_arguments(["--config", str(path)])
        assert f"--config {path}: " in capsys.readouterr().err
