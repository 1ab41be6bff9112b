"""jaxspec plan: what it prints and how it ends, without a device."""

import json
import os
import subprocess
import sys

import pytest

from jaxspec.capacity.gpus import GPUS
from jaxspec.plan import main
from tests.capacity.configs import EAGLE3_LLAMA_8B, LLAMA_8B
from tests.capacity.files import config_file


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """Llama-3.1-8B and its EAGLE-3 head, of which only the configs are there."""
    directory = tmp_path_factory.mktemp("llama")
    target, head = config_file(directory / "config.json", LLAMA_8B), config_file(directory / "head.json", EAGLE3_LLAMA_8B)
    return ["--model-path", str(target), "--draft", str(head)]


def plan(flags: list[str], capsys, *more: str) -> tuple[int, dict]:
    status = main([*flags, "--json", *more])
    return status, json.loads(capsys.readouterr().out)


def test_llama_31_8b_on_an_h100(flags, capsys):
    status, found = plan(flags, capsys, "--context", "4096", "--batch", "8", "--accept-length", "2.9")
    assert status == 0 and found["fits"] and (found["tree"], found["head"], found["dtype"]) == ("5/4/8", "EAGLE3", "bfloat16")
    assert found["parameters"] == {"target": 8_030_261_248, "head": 424_689_664}
    assert found["cache_bytes_per_token"] == {"target": 131072, "head": 4096}
    room = 80e9 * 0.75 * 0.85 - 2 * (8_030_261_248 + 424_689_664)
    assert found["cache_tokens"] == pytest.approx(room / 135168, rel=0.001)
    assert found["concurrent_requests"] == found["cache_tokens"] // 4096 == 61
    assert not found["temporaries"]["counted"] and found["temporaries"]["left_free_bytes"] == pytest.approx(9e9)
    cycle = found["cycle"]
    assert cycle["memory_seconds"] == pytest.approx(sum(cycle["moved_bytes"].values()) / 3.35e12)
    assert found["tokens_per_second"] == {"2.9": pytest.approx(8 * 2.9 / cycle["seconds_at_least"])}
    assert found["break_even_accept_length"] == pytest.approx(cycle["seconds_at_least"] / found["plain_step"]["seconds_at_least"])


def test_what_does_not_fit_is_said(flags, capsys):
    assert main([*flags, "--gpu", "L4"]) == 1
    said = capsys.readouterr().out
    assert "MISSING" in said and "NO: 2,048 tokens of cache are needed" in said and "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in said
    assert main([*flags, "--gpu", "l4", "--jax-memory-share", "0.95"]) == 0
    said = capsys.readouterr().out
    assert "fits      yes" in said and "the model's context is 131,072 tokens: serve with --context-length" in said


def test_the_text_says_what_is_not_counted(flags, capsys):
    assert main([*flags, "--batch", "4"]) == 0
    said = capsys.readouterr().out
    assert "Not counted yet: temporaries" in said and "left free for temporaries (15% of the rest) |  9.00" in said
    assert "data-sheet numbers" in said and "break-even" in said and "of each request" in said


def test_gpus_may_be_described_by_hand_and_several(flags, capsys):
    _, found = plan(flags, capsys, "--gpu-memory", "100", "--gpu-bandwidth", "1000", "--tp", "2", "--tree", "plain")
    assert (found["gpu"]["memory"], found["gpu"]["bandwidth"], found["head"]) == (100e9, 1e12, None)
    assert found["weight_bytes"] == {"target": 8_030_261_248} and list(found["tokens_per_second"]) == ["1"]
    assert main([*flags, "--tp", "2"]) == 0
    assert "this version of jaxspec runs on one GPU" in capsys.readouterr().out


def test_the_built_in_model_is_the_default(capsys):
    status, found = plan([], capsys)
    assert (status, found["model"], found["head"], found["parameters"]["target"]) == (0, "jaxspec-demo", "EAGLE3", 12_069_440)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tp", "3"], "--tp 3 does not divide the 8 KV heads"),
        (["--accept-length", "7"], "--accept-length must be from 1 to 6 with the tree 5/4/8, got 7"),
        (["--gpu-memory", "0"], "--gpu-memory must be above 0"),
        (["--mem-fraction-static", "1.5"], "--mem-fraction-static must be in (0, 1]"),
        (["--draft", "/nowhere"], "/nowhere"),
    ],
)
def test_a_mistake_is_one_line(flags, more, said, capsys):
    assert main([*flags, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxspec plan: error: ") and said in error and error.count("\n") == 1


def test_no_device_is_touched(flags):
    """JAX fails here as soon as it looks for one."""
    environment = os.environ | {"JAX_PLATFORMS": "nowhere"}
    command = [sys.executable, "-m", "jaxspec.plan", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "8,030,261,248 parameters" in done.stdout, done.stderr


def test_gpus_have_plausible_numbers():
    """Bytes, bytes per second and operations per second, not GB or TB."""
    for gpu in GPUS.values():
        assert 16e9 <= gpu.memory <= 300e9 and 2e11 <= gpu.bandwidth <= 1e13 and 1e14 <= gpu.arithmetic <= 5e15
