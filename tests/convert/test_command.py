"""`python -m convert` as a user meets it: what it says, its exit status, and one clear line for a mistake."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from convert.__main__ import main
from jaxspec.checkpoints.exporting import DIALECTS
from jaxspec.testing import random_block, random_eagle, random_head, random_mtp, tiny_target, write_head, write_target
from tests.checkpoints.real_heads import dflash, eagle3_llama31, eagle_llama2, speculators
from tests.reference import CHECKPOINTS, HEAD, MIMO, TARGET


def test_inspect_tells_targets_and_heads_apart(capsys):
    assert main(["--inspect", str(TARGET)]) == 0
    said = capsys.readouterr().out
    assert "target (Hugging Face, llama)" in said and "8 x hidden 64" in said
    assert "328,768 in 75 tensors, 2 files" in said  # 2*256*64 + 8*(3*64*64 + 3*64*128 + 2*64) + 64
    assert main(["--inspect", str(HEAD), "--target", str(TARGET)]) == 0
    said = capsys.readouterr().out
    assert "EAGLE3 draft head (EAGLE-3, SafeAILab, SGLang and SpecForge)" in said and "256, draft 128" in said
    assert "entering layers 2, 4, 5 of the target" in said and "fits  yes" in said
    assert main(["--inspect", str(MIMO)]) == 0
    said = capsys.readouterr().out
    assert "q/k/v biases" in said and "comes with an MTP layer" in said


def test_inspect_needs_no_target(tmp_path, capsys):
    heads = [eagle_llama2(), eagle3_llama31(), speculators(), eagle3_llama31(hidden=16, target=32), dflash()]
    heads[3] = heads[3].but(config={"target_hidden_size": 32, "norm_output": True}, embed_tokens__weight=(128, 16))
    expected = [
        ("EAGLE draft head (EAGLE-1/2", "brings  embedding", "the target's hidden after its final norm"),
        ("SafeAILab", "brings  lm_head", "entering layers 2, N/2 and N-3 of the target", "switches  none"),
        ("(EAGLE-3, speculators)", "brings  embedding and lm_head", "switches  norm_before_residual"),
        ("1 x hidden 16", "switches  norm_output"),
        (
            "DFLASH draft head (DFlash",
            "brings  neither",
            "entering layers 2, 4, 6",
            "6 positions, 5 drafts",
            "all of the text and all",
        ),
    ]
    for number, (head, said) in enumerate(zip(heads, expected, strict=True)):
        assert main(["--inspect", str(head.write(tmp_path / str(number), "float16"))]) == 0
        shown = capsys.readouterr().out
        assert all(part in shown for part in said), shown


def test_a_head_for_another_target_is_an_error(tmp_path, capsys):
    head = eagle3_llama31().write(tmp_path / "head")
    assert main(["--inspect", str(head), "--target", str(TARGET)]) == 2
    assert "does not fit the target: its target_hidden_size (or hidden_size) is 32, the target's 64" in capsys.readouterr().err
    assert main(["--inspect", str(TARGET), "--target", str(TARGET)]) == 2
    assert "--target is for draft heads" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"12345678", b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"{]"])
def test_broken_files_are_named(tmp_path, capsys, content):
    directory = write_target(tmp_path / "target", tiny_target())
    (directory / "model.safetensors").write_bytes(content)
    assert main(["--inspect", str(directory)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxspec convert: error: ") and "model.safetensors can't be read" in error and "Traceback" not in error


def test_a_round_of_commands(tmp_path, capsys):
    """Convert a target with its head and check both, look at the result, verify it, export the head, see that it fits."""
    converted, back = str(tmp_path / "converted"), str(tmp_path / "back")
    draft = str(CHECKPOINTS / "eagle3_trained_dv128")
    assert main([str(TARGET), converted, "--draft", draft, "--check"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == f"wrote {converted}"
    assert shown.out.count("largest difference 0 on 64 random tokens") == 2
    assert "converting target: 100%" in shown.err and "converting eagle3_trained_dv128: 100%" in shown.err
    assert main(["--inspect", converted]) == 0
    shown = capsys.readouterr().out
    assert "target (converted from Hugging Face, llama)" in shown and "comes with an EAGLE3 head" in shown
    assert main(["--inspect", f"{converted}/draft", "--target", str(TARGET)]) == 0
    assert "fits  yes" in capsys.readouterr().out
    assert main(["--verify", converted, "--quiet"]) == 0
    assert capsys.readouterr() == (f"{converted} is intact: every file and parameter matches its hash\n", "")
    assert main([converted, back, "--export", "speculators", "--quiet"]) == 0
    assert main(["--inspect", back, "--target", converted]) == 0
    assert main([converted, str(tmp_path / "hf"), "--export", "huggingface"]) == 0
    assert main(["--inspect", str(tmp_path / "hf")]) == 0


def test_a_head_alone_is_converted_checked_and_exported_beside_its_target(tmp_path, capsys):
    target, head = str(write_target(tmp_path / "target", tiny_target())), str(speculators().write(tmp_path / "head"))
    assert main([head, str(tmp_path / "converted"), "--target", target, "--check", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "draft head: largest difference 0 " in shown and "target:" not in shown
    assert main([head, str(tmp_path / "exported"), "--export", "sglang", "--target", target, "--quiet"]) == 0
    assert "warning: norm_before_residual=true is written" in capsys.readouterr().err


def test_a_changed_checkpoint_fails_its_verification(tmp_path, capsys):
    assert main([str(TARGET), str(tmp_path / "converted"), "--quiet"]) == 0
    (tmp_path / "converted/config.json").write_text("{}")
    assert main(["--verify", str(tmp_path / "converted"), "--quiet"]) == 1
    assert "file config.json has changed" in capsys.readouterr().out


def test_check_finds_a_difference(tmp_path, capsys, monkeypatch):
    """A conversion that mixes up two matrices exits with 1."""
    from jaxspec.checkpoints import layout

    right = layout.transposed
    monkeypatch.setattr("jaxspec.checkpoints.layout.transposed", lambda *parts: right(*(part[::-1] for part in parts)))
    assert main([str(TARGET), str(tmp_path / "converted"), "--quiet"]) == 0
    monkeypatch.undo()
    from convert.check import compare_targets

    assert compare_targets(TARGET, tmp_path / "converted").largest > 0.1


def test_a_failed_check_is_the_exit_status(tmp_path, capsys, monkeypatch):
    """Rows in another order; in another dtype a difference is no failure."""
    monkeypatch.setattr("convert.converting.cast", lambda array, dtype: np.ascontiguousarray(array[::-1]))
    assert main([str(TARGET), str(tmp_path / "converted"), "--check", "--quiet"]) == 1
    assert "target: largest difference" in capsys.readouterr().out
    assert main([str(TARGET), str(tmp_path / "cast"), "--dtype", "float32", "--check", "--quiet"]) == 0


def test_check_with_a_cast_tells_how_far_it_is(tmp_path, capsys):
    directory = write_target(tmp_path / "mimo", tiny_target(qkv_bias=True), head=random_mtp(tiny_target(qkv_bias=True).config))
    assert main([str(directory), str(tmp_path / "converted"), "--dtype", "bfloat16", "--check", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert said.count("largest difference") == 2 and "draft head: largest difference" in said


def test_every_kind_of_head_is_exported_or_refused_in_every_dialect(tmp_path, capsys):
    """Heads that were not converted."""
    model = tiny_target(qkv_bias=True)
    mimo = write_target(tmp_path / "MTP", model, head=random_mtp(model.config))
    made = {
        "EAGLE": random_eagle(model.config),
        "EAGLE3": random_head(model.config),
        "DFLASH": random_block(model.config),
        "DSPARK": random_block(model.config, markov_rank=4),
    }
    heads = {"MTP": mimo, **{kind: write_head(tmp_path / kind, head) for kind, head in made.items()}}
    written = set()
    for (kind, head), dialect in itertools.product(heads.items(), DIALECTS):
        status = main([str(head), str(tmp_path / f"{kind} {dialect}"), "--export", dialect, "--target", str(mimo), "--quiet"])
        said = capsys.readouterr().err
        if status == 0:
            written.add((kind, dialect))
        else:
            assert said.count("\n") == 1 and f"can't be written in the {dialect} dialect" in said
    eagle3 = {("EAGLE3", dialect) for dialect in ("safeailab", "sglang", "speculators")}
    blocks = {("DFLASH", "z-lab"), ("DSPARK", "deepspec")}
    assert written == {("MTP", "mimo"), ("EAGLE", "safeailab"), ("EAGLE", "sglang"), *eagle3, *blocks}


@pytest.mark.parametrize("rank", [None, 4], ids=["DFlash", "DSpark"])
def test_check_compares_block_heads(tmp_path, capsys, rank):
    model = tiny_target(num_layers=2)
    target = write_target(tmp_path / "target", model)
    head = write_head(tmp_path / "head", random_block(model.config, markov_rank=rank))
    assert main([str(head), str(tmp_path / "converted"), "--target", str(target), "--check", "--quiet"]) == 0
    assert "draft head: largest difference 0 on" in capsys.readouterr().out


def test_check_knows_the_token_map_and_warnings_are_lines(tmp_path, capsys):
    (tmp_path / "map.json").write_text("[5, 9, 2]")
    how = ["--token-map", str(tmp_path / "map.json"), "--check", "--quiet"]
    assert main([str(CHECKPOINTS / "eagle1_rand_bias"), str(tmp_path / "eagle"), "--target", str(TARGET), *how]) == 0
    shown = capsys.readouterr()
    assert "draft head: largest difference 0 on" in shown.out and shown.err == ""
    assert main([str(HEAD), str(tmp_path / "eagle3"), "--target", str(TARGET), *how]) == 0
    said = capsys.readouterr().err
    assert said.startswith("warning: the token map ") and said.count("\n") == 1


def test_errors_name_the_head_and_not_its_target(tmp_path, capsys):
    assert main([str(TARGET), str(tmp_path / "converted"), "--draft", "yuhuili/EAGLE3", "--quiet"]) == 2
    assert capsys.readouterr().err.startswith("jaxspec convert: error: yuhuili/EAGLE3 is no path here, and ")
    assert main([str(tmp_path), str(tmp_path / "converted"), "--target", str(HEAD), "--quiet"]) == 2
    assert f"{HEAD}: this is not a target" in capsys.readouterr().err


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("convert.__main__.run", interrupted)
    assert main(["a", "b"]) == 130
    assert capsys.readouterr().err == "jaxspec convert: interrupted; nothing was written\n"


def test_a_closed_pipe_is_no_error():
    command = f"PYTHONUNBUFFERED= {sys.executable} -m convert --inspect {TARGET} | true; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (141, "")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "give SOURCE and OUTPUT, or --inspect PATH"),
        (["a"], "give SOURCE and OUTPUT"),
        (["a", "b", "--inspect", "c"], "stand alone"),
        (["--inspect", "c", "--verify", "d"], "stand alone"),
        (["a", "b", "--export", "sglang", "--check"], "--check is for converting: leave it out"),
        (["a", "b", "--draft", "c", "--target", "d"], "give one of them"),
        (["a", "b", "--dtype", "int8"], "--dtype"),
        (["--inspect", "a", "--dtype", "float16"], "--dtype is for converting: leave it out"),
        (["--verify", "a", "--target", "b"], "--target is for heads: leave it out"),
        (["a", "b", "--export", "huggingface", "--target", "c"], "--target is for heads: leave it out"),
        (["a", "b", "--exp", "sglang"], "there is no option --exp (see --help)"),
        (["--inspect", "a", "--token_map", "b"], "--token-map is for converting: leave it out"),
        (["--verify", "a", "--revision", "v2"], "leave out --revision"),
        (["a", "b", "--speculative-draft-model-revision", "v2"], "is for the HEAD of --draft"),
        ([str(TARGET), "b", "--revision", "v2"], "is on this machine: leave out the revision 'v2'"),
        (["nothing", "b"], "nothing does not exist"),
        (["--inspect", "nothing"], "nothing does not exist"),
        (["--verify", "nothing"], "nothing is not a converted checkpoint: it does not exist"),
        ([str(TARGET), "b", "--export", "huggingface"], "is not a converted checkpoint: convert a GGUF file first"),
        ([str(HEAD), "b"], "this is not a target, which has model.embed_tokens and model.norm, but a draft head (EAGLE3)"),
    ],
)
def test_a_wrong_command_is_one_clear_line(tmp_path, monkeypatch, capsys, command, said):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(command)
    except SystemExit as end:
        status = end.code
    assert status == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_loads_no_jax():
    code = "import sys; import convert.__main__; print({'jax', 'numpy', 'safetensors'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
    shown = subprocess.run([sys.executable, "-m", "convert", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and "--token-map" in shown.stdout and "examples:" in shown.stdout
