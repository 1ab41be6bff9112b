"""jaxspec plan: what it prints and how it ends, without a device."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time

import pytest

from jaxspec.planner import command
from jaxspec.planner import compile as compile_module
from jaxspec.planner.command import main
from jaxspec.planner.compile import CompiledCycle, CompilerError, CycleShape, Launch
from jaxspec.planner.gpus import GPUS
from jaxspec.tree_shape import TreeShape
from tests.planner.configs import DFLASH_QWEN3_8B, EAGLE3_LLAMA_8B, LLAMA_8B, QWEN3_8B, config_file


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """Llama-3.1-8B and its EAGLE-3 head, of which only the configs are there."""
    directory = tmp_path_factory.mktemp("llama")
    target, head = config_file(directory / "config.json", LLAMA_8B), config_file(directory / "head.json", EAGLE3_LLAMA_8B)
    return ["--no-compile", "--model-path", str(target), "--draft", str(head)]


def plan(flags: list[str], capsys, *more: str) -> tuple[int, dict]:
    return main([*flags, "--no-compile", "--json", *more]), json.loads(capsys.readouterr().out)


def test_llama_31_8b_on_an_h100(flags, capsys):
    status, found = plan(flags, capsys, "--context", "4096", "--batch", "8", "--accept-length", "2.9")
    assert status == 0 and found["fits"] and (found["tree"], found["head"], found["dtype"]) == ("5/4/8", "EAGLE3", "bfloat16")
    assert found["parameters"] == {"target": 8_030_261_248, "head": 424_689_664}
    assert found["cache_bytes_per_token"] == {"target": 131072, "head": 4096}
    room = 80e9 * 0.75 * 0.85 - 2 * (8_030_261_248 + 424_689_664)
    assert found["cache_tokens"] == pytest.approx(room / 135168, rel=0.001)
    assert found["concurrent_requests"] == found["cache_tokens"] // 4096 == 61
    assert found["temporaries"] == {"counted": False, "reason": "--no-compile was given", "left_free_bytes": pytest.approx(9e9)}
    cycle = found["cycle"]
    assert cycle["memory_seconds"] == pytest.approx(sum(cycle["moved_bytes"].values()) / 3.35e12)
    assert found["tokens_per_second"] == {"2.9": pytest.approx(8 * 2.9 / cycle["seconds_at_least"])}
    assert found["break_even_accept_length"] == pytest.approx(cycle["seconds_at_least"] / found["plain_step"]["seconds_at_least"])


def test_a_cache_of_8_bits(flags, capsys):
    _, found = plan(flags, capsys, "--kv-cache-dtype", "fp8_e4m3")
    assert found["cache_bytes_per_token"] == {"target": 65536, "head": 2048}
    _, found = plan(flags, capsys, "--kv-cache-dtype", "fp8", "--speculative-draft-kv-cache-dtype", "auto")
    assert found["cache_bytes_per_token"] == {"target": 65536, "head": 4096}


def test_the_first_line_says_what_fits_and_how_long_a_cycle_takes(flags, capsys):
    _, found = plan(flags, capsys, "--context", "4096", "--batch", "8")
    assert main([*flags, "--context", "4096", "--batch", "8", "--accept-length", "2.5"]) == 0
    said = capsys.readouterr().out
    shown = f"about {found['time_model']['together']['cycle 5/4/8']:.1f} ms"
    first = said.splitlines()[0]
    assert first == f"fits one NVIDIA H100 SXM: {found['concurrent_requests']} requests of 4,096 tokens, {shown} a cycle of 8"
    assert said.count("\n|--") == 1 and said.count(shown) == 2 and "times plain decoding" in said


@pytest.mark.parametrize("way", range(3))
def test_what_does_not_fit_is_said_with_ways_that_work(flags, capsys, way):
    assert main([*flags, "--gpu", "L4"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("does not fit one NVIDIA L4: 1.89 GB are missing for 1 request of 2,048 tokens; try XLA_PYTHON_CLIENT_")
    options = re.findall(r"(--[a-z-]+) (\w[\w.]*)", first)
    assert [name for name, _ in options] == ["--jax-memory-share", "--quantization", "--tp"]
    assert main([*flags, "--gpu", "l4", *options[way]]) == 0
    assert capsys.readouterr().out.startswith("fits ")


def test_a_quantised_head_stays_as_it_is(flags, tmp_path, capsys):
    """Also where fewer bits of the target are looked for."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    head = config_file(tmp_path / "head.json", EAGLE3_LLAMA_8B | {"quantization_config": gptq})
    small = [*flags, "--draft", str(head), "--gpu-memory", "24"]
    (dense, quantised) = (plan(small, capsys, *more)[1]["weight_bytes"] for more in ([], ["--quantization", "int8"]))
    assert quantised["head"] == dense["head"] < 2 * 424_689_664 and quantised["target"] < 0.6 * dense["target"]


def test_a_batch_or_a_context_that_would_fit_is_named(flags, capsys):
    many = ["--context", "2000000"]
    for asked, option in ((["--batch", "300"], "--batch"), (many, "--context"), ([*many, "--batch", "3"], "--context")):
        assert main([*flags, *asked]) == 1
        (value,) = re.findall(rf"{option} (\d+)", capsys.readouterr().out.splitlines()[0])
        assert main([*flags, *asked, option, value]) == 0
        capsys.readouterr()
        assert main([*flags, *asked, option, f"{int(value) + 16}"]) == 1
        capsys.readouterr()


def test_what_is_missing_counts_whole_pages(flags, capsys):
    assert main([*flags, "--gpu", "l4", "--jax-memory-share", "0.95", "--context", "1", "--batch", "300000"]) == 1
    (missing,) = re.findall(r"l?4: (-?[\d.]+) GB are missing", capsys.readouterr().out, re.I)
    assert float(missing) > 16 * 300_000 * 32 * 2 * 8 * 128 * 2 / 1e9 - 24


def test_drafts_from_the_text_have_no_times(capsys):
    assert main(["--draft", "ngram"]) == 2 and "the times of drafts from the text are not known" in capsys.readouterr().err


def test_a_tree_that_is_deeper_than_a_block_is_refused(tmp_path, capsys):
    files = config_file(tmp_path / "target.json", QWEN3_8B), config_file(tmp_path / "head.json", DFLASH_QWEN3_8B)
    asked = ["--no-compile", "--model-path", str(files[0]), "--draft", str(files[1]), "--tree"]
    assert main([*asked, "15/1/16"]) == 0
    assert main([*asked, "16/1/17"]) == 2
    assert "the head drafts at most 15 tokens" in capsys.readouterr().err


def test_a_context_below_the_models_is_told(flags, capsys):
    assert main([*flags, "--gpu", "l4", "--jax-memory-share", "0.95"]) == 0
    assert "The model's context is 131,072 tokens: serve with --context-length" in capsys.readouterr().out
    assert main([*flags, "--context", "200000"]) == 0
    assert "The model was made for 131,072 tokens: text beyond that may be poor" in capsys.readouterr().out


def test_the_text_says_what_is_not_counted(flags, capsys):
    assert main([*flags, "--batch", "4", "--details"]) == 0
    said = capsys.readouterr().out
    assert "Launches and temporaries are not counted: --no-compile was given." in said
    assert "left free for temporaries (15% of the rest) |  9.00" in said and "data-sheet numbers" in said


def test_the_time_model_is_called_a_model(flags, capsys):
    _, found = plan(flags, capsys, "--gpu", "h200", "--context", "1024")
    assert not found["time_model"]["is_a_measurement"]
    assert list(found["time_model"]["together"]) == ["cycle 5/4/8", "plain step"]
    assert found["time_model"]["assumed"]["copy_bytes_per_second"] == pytest.approx(4.3e12, rel=0.001)
    _, measured = plan(flags, capsys, "--gpu", "h200", "--context", "1024", "--gpu-bandwidth", "4000")
    assert measured["time_model"]["assumed"]["copy_bytes_per_second"] == 4e12
    model = found["time_model"]
    assert model["break_even_accept_length"] == pytest.approx(model["together"]["cycle 5/4/8"] / model["together"]["plain step"])
    assert model["tokens_per_second"]["2"] == pytest.approx(2e3 / model["together"]["cycle 5/4/8"])
    assert main([*flags, "--gpu", "h200", "--details"]) == 0
    said = capsys.readouterr().out
    assert "forecast for greedy requests, not a measurement" in said and "copies at 4.30 TB/s" in said and "target: weights" in said
    two = plan(flags, capsys, "--tp", "2")[1]["time_model"]["milliseconds"]["plain step"]
    assert two["exchanges between GPUs"] == pytest.approx(10e-3 * (2 * 32 + 2), rel=0.05)
    machines = plan(flags, capsys, "--tp", "2", "--nnodes", "2")[1]["time_model"]["milliseconds"]["plain step"]
    assert machines["exchanges between GPUs"] > 2.5 * two["exchanges between GPUs"]


def test_gpus_may_be_described_by_hand_and_several(flags, capsys):
    _, found = plan(flags[:3], capsys, "--gpu-memory", "100", "--gpu-bandwidth", "1000", "--tp", "2", "--tree", "plain")
    assert (found["gpu"]["memory"], found["gpu"]["bandwidth"], found["head"]) == (100e9, 1e12, None)
    assert found["weight_bytes"] == {"target": 8_030_261_248 + 65 * 4096} and list(found["tokens_per_second"]) == ["1"]
    assert main([*flags, "--tp", "2"]) == 0
    assert "fewest of these GPUs for this batch and context: --tp 1." in capsys.readouterr().out
    assert plan(flags, capsys, "--tp", "3")[1]["cache_bytes_per_token"]["target"] == 131072  # heads that 3 can't divide
    assert main([*flags, "--tp", "3"]) == 0 and "3 GPUs can't divide the attention heads" in capsys.readouterr().out


def test_the_fewest_gpus_are_found(flags, capsys):
    status, found = plan(flags, capsys, "--gpu-memory", "12")
    assert (status, found["fits"], found["smallest_tp"]) == (1, False, 4)
    assert plan(flags, capsys, "--gpu-memory", "12", "--tp", "4")[1]["fits"]


def test_the_built_in_model_is_the_default(capsys):
    status, found = plan([], capsys)
    assert (status, found["model"], found["head"], found["parameters"]["target"]) == (0, "jaxspec-demo", "EAGLE3", 12_069_440)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tp", "3", "--nnodes", "2"], "--nnodes 2 machines can't have the same number of --tp 3 GPUs"),
        (["--accept-length", "7"], "--accept-length must be from 1 to 6 with the tree 5/4/8, got 7"),
        (["--gpu-memory", "0"], "--gpu-memory must be above 0, got 0.0"),
        (["--gpu-memory", "inf"], "--gpu-memory must be a number between 0 and 1000000, got inf"),
        (["--mem-fraction-static", "1.5"], "--mem-fraction-static must be a number between 0 and 1, got 1.5"),
        (["--draft", "/nowhere"], "/nowhere"),
        (["--tree", "plain"], "--tree plain drafts nothing: leave out --speculative-draft-model-path"),
        (["--revision", "v2"], "config.json is on this machine: leave out the revision 'v2'"),
        (["--speculative-draft-model-revision", "v2"], "head.json is on this machine: leave out the revision 'v2'"),
    ],
)
def test_a_mistake_is_one_line(flags, more, said, capsys):
    assert main([*flags, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxspec plan: error: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize(("tree", "said"), [([], "needs a draft head: give"), (["--tree", "plain"], "drafts nothing: leave out")])
def test_options_of_a_head_need_one(flags, tree, said, capsys):
    assert main([*flags[:3], "--speculative-draft-kv-cache-dtype", "fp8", *tree]) == 2
    assert said in capsys.readouterr().err


def test_no_device_is_touched(flags):
    """JAX fails here as soon as it looks for one."""
    environment = os.environ | {"JAX_PLATFORMS": "nowhere"}
    arguments = [sys.executable, "-m", "jaxspec", "plan", *flags, "--details"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "8,030,261,248 parameters" in done.stdout, done.stderr


def compiled(**changes) -> CompiledCycle:
    launch = Launch("kCustomKernel", "rms_norm", "jit(cycle)/verify/layer_3/x", in_graph=True)
    cycle = CompiledCycle(31.0, 17 * 10**9, 10**9, 20 * 10**6, 10**9, False, (launch,) * 416, {"rms_norm": 416}, (), {})
    return dataclasses.replace(cycle, **changes)


def test_what_the_compiler_says_is_shown(flags, capsys, monkeypatch):
    """The compiler itself is tried in tests/planner/test_gpu_program.py."""
    asked = []

    def compile_cycles(model, draft, cycles, **more):
        asked.append((model.name, draft.name, cycles, more))
        return [compiled()]

    monkeypatch.setattr(command, "why_not", lambda gpu: None)
    monkeypatch.setattr(command, "compile_cycles", compile_cycles)
    flags = [*flags[1:], "--batch", "2", "--context", "1000", "--gpu", "h200"]
    assert main([*flags, "--details"]) == 0
    said = capsys.readouterr()
    shape = CycleShape(TreeShape(), 2, 1000, 16)
    how = {"gpu": "h200", "dtype": "bfloat16", "token_map": None, "quantization": (None, None), "driver": "13.0.0"}
    how |= {"tp": 1, "nodes": 1, "refuse_spills": True}
    assert asked == [("config.json", "head.json", [shape], how)]
    assert "of which the cycle uses" in said.out and "|  0.02 |" in said.out
    assert "13.0" in said.out and "all in one CUDA graph" in said.out
    assert said.err.startswith("compiling the cycle for NVIDIA H200")
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["temporaries"]["bytes"] == 20e6
    assert found["launches"]["stages"] == {"verify": 416} and found["launches"]["in_one_graph"]


def test_a_cycle_that_takes_too_much_while_it_runs_does_not_fit(flags, capsys, monkeypatch):
    monkeypatch.setattr(command, "why_not", lambda gpu: None)
    monkeypatch.setattr(command, "compile_cycles", lambda *_, **__: [compiled(temporary_bytes=10**10)])
    assert main(flags[1:]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert "a cycle takes 10.00 GB while it runs, and 9.00 are left; try " in first and "or a lower --mem-fraction-static" in first


@pytest.mark.parametrize(("more", "reason"), [(["--gpu", "l4"], "description of the GPU"), ([], "the compiler failed: no luck")])
def test_why_nothing_was_compiled_is_said(flags, capsys, monkeypatch, more, reason):
    def fail(*_, **__):
        raise CompilerError("no luck")

    monkeypatch.setattr(compile_module, "PLUGINS", ("json",))  # something that is installed
    monkeypatch.setattr(command, "compile_cycles", fail)
    main([*flags[1:], *more])
    assert reason in capsys.readouterr().out


def test_a_real_plan_within_a_minute(flags, gpu_compiler, capsys):
    """The whole command, as people run it, compiler included; its temporaries and launches are those of the proof."""
    started = time.monotonic()
    arguments = [sys.executable, "-m", "jaxspec", "plan", *flags[1:], "--gpu", "h100", "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["temporaries"]["bytes"] < 64e6 and found["launches"]["in_one_graph"]
    assert 9 < found["launches"]["per_target_layer"] <= 11
    print(f"jaxspec plan with the compiler: {time.monotonic() - started:.0f} s")


def test_gpus_have_plausible_numbers():
    """Bytes, bytes per second and operations per second, not GB or TB."""
    for gpu in GPUS.values():
        assert 16e9 <= gpu.memory <= 300e9 and 2e11 <= gpu.bandwidth <= 1e13 and 1e14 <= gpu.arithmetic <= 5e15
