"""Reading XLA's dumps: a small one, written by hand after a real one."""

from pathlib import Path

import pytest

from jaxspec.planner.compile import Launch, read_custom_calls, read_launches, touches_host

SEQUENCE = """\
000: kCommandBuffer [source | sink]
    001: kCustomKernel [source        | next=002 (1)] rms_norm grid: [8, 1, 1] threads: [256, 1, 1]  shared_memory: 4096 bytes
    002: kCopy         [prev=001 (1)  | next=003 (1)] kCopy
    003: kConditional  [prev=002 (1)  | sink        ]
      branch_0:
        004: kCustomKernel [source | sink] greedy grid: [1, 1, 1] threads: [64, 1, 1]  shared_memory: 0 bytes
      branch_1:
        005: kConditional  [source | sink]
          true_branch:
            006: kCustomKernel [source | sink] nested grid: [1, 1, 1] threads: [64, 1, 1]  shared_memory: 0 bytes
          false_branch:
            007: kCustomKernel [source | sink] other grid: [1, 1, 1] threads: [64, 1, 1]  shared_memory: 0 bytes
    008: kCustomKernel [source | sink] gemm grid: [1, 1, 1] threads: [64, 1, 1]  shared_memory: 0 bytes
    009: kConditional  [source | sink]
      true_branch:
        010: kCustomKernel [source | sink] zeros grid: [1, 1, 1] threads: [64, 1, 1]  shared_memory: 0 bytes
      false_branch:
        011: kCustomKernel [source | sink] logprobs grid: [1, 1, 1] threads: [64, 1, 1]  shared_memory: 0 bytes
012: kWhile [source | sink] while
"""
METADATA = "".join(
    f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}\n}}\n'
    for number, name in {1: "custom-call.7", 4: "argmax.1", 8: "fusion.3"}.items()
)
PROGRAM = """\
ENTRY %main {
  %custom-call.7 = bf16[8,64]{1,0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(cycle)/verify/layer_12/jit(either)/rms_norm/pallas_call"}
  %argmax.1 = s32[8]{0} fusion(%y), metadata={op_name="jit(cycle)/verify/choose/argmax" stack_frame_id=3}
  ROOT %fusion.3 = f32[8]{0} fusion(%z), metadata={op_name="jit(cycle)/scatter"}
}
"""


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    (tmp_path / "module_0001.jit_cycle.thunk_sequence_after_thunk_passes.txt").write_text(SEQUENCE)
    (tmp_path / "module_0001.jit_cycle.thunk_sequence.txt").write_text(SEQUENCE * 2)  # before graphs are formed: not to be read
    (tmp_path / "module_0001.jit_cycle.thunk_metadata.txt").write_text(METADATA)
    (tmp_path / "module_0001.jit_cycle.sm_9.0a_gpu_after_optimizations.txt").write_text(PROGRAM)
    return tmp_path


def test_launches_are_read_with_where_they_come_from(dump):
    found = read_launches(dump)
    kernels = "rms_norm - - greedy - nested other gemm - zeros logprobs -"
    assert [launch.kernel or "-" for launch in found] == kernels.split()
    assert found[0] == Launch("kCustomKernel", "rms_norm", "jit(cycle)/verify/layer_12/jit(either)/rms_norm/pallas_call", True)
    assert (found[0].stage, found[0].layer) == ("verify", 12)
    assert (found[3].stage, found[3].layer) == ("verify", None)
    assert found[7].stage == "other"  # it has a scope of its own, which names no stage


def test_a_launch_without_a_scope_has_that_of_the_one_before(dump):
    found = read_launches(dump)
    assert (found[1].stage, found[1].layer) == ("verify", 12)
    assert found[8].scope == found[7].scope


def test_what_is_outside_graphs_is_seen(dump):
    assert [launch.kind for launch in read_launches(dump) if not launch.in_graph] == ["kWhile"]


def test_only_the_first_way_of_a_switch_runs_by_default(dump):
    found = [launch.kernel for launch in read_launches(dump) if launch.kernel and 0 in launch.kinds]
    assert found == ["rms_norm", "greedy", "gemm", "zeros"]


def test_each_kind_of_sampling_takes_its_branch(dump):
    """A switch of four is by kind; one of two in `learn` asks whether the batch is sampled; others are not taken."""
    file = next(dump.glob("*gpu_after_optimizations.txt"))
    zeros = '  %zeros.9 = f32[8] x(), metadata={op_name="jit(cycle)/learn/cond"}\n'
    file.write_text(PROGRAM.replace("ROOT %fusion.3", f"{zeros}  ROOT %fusion.3"))
    metadata = next(dump.glob("*thunk_metadata.txt"))
    thunk = '\n  thunk_info {\n    profile_annotation: "zeros.9"\n    thunk_id: 9\n  }\n}\n'
    metadata.write_text(METADATA + METADATA.splitlines()[0] + thunk)
    kinds = {launch.kernel: list(launch.kinds) for launch in read_launches(dump) if launch.kernel}
    assert kinds["greedy"] == [0] and kinds["nested"] == [1] and kinds["other"] == []
    assert (kinds["zeros"], kinds["logprobs"]) == ([0], [1, 2, 3])


def test_memory_of_the_host_is_seen(dump):
    assert not touches_host(dump)
    file = next(dump.glob("*gpu_after_optimizations.txt"))
    file.write_text(PROGRAM.replace("bf16[8,64]{1,0}", "bf16[8,64]{1,0:S(5)}"))
    assert touches_host(dump)


def test_libraries_are_told_from_our_kernels(dump):
    assert read_custom_calls(dump) == ({"rms_norm": 1}, {})
    file = next(dump.glob("*gpu_after_optimizations.txt"))
    sort = '  %custom-call.8 = (f32[9], s32[9]) custom-call(%y), custom_call_target="xla.gpu.ext.cub_sort_pairs", metadata={}\n'
    top_k = '  %custom-call.9 = (f32[1,1], s32[1,1]) custom-call(%z), custom_call_target="__gpu$TopK", metadata={}\n'
    file.write_text(PROGRAM + 2 * sort + top_k)
    assert read_custom_calls(dump) == ({"rms_norm": 1, "topk": 1}, {"xla.gpu.ext.cub_sort_pairs": 2})


def test_no_dump_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="dumped nothing"):
        read_launches(tmp_path)
