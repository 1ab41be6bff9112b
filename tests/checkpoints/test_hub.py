"""Models by their names on the Hub, against a Hub on this machine."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

import convert.__main__ as convert
from jaxspec.checkpoints.hub import HubOptions, is_hub_name, local_path
from jaxspec.checkpoints.json_files import TEMPLATES
from jaxspec.config import EngineConfig
from jaxspec.defaults import model_directory
from jaxspec.load import find_files
from jaxspec.planner import command as plan
from jaxspec.testing import random_head, tiny_target, write_head, write_target
from jaxspec.train import command as train
from tests.hub import BRANCH, Hub, running_hub

TARGET, HEAD = "org/Tiny-Llama.1", "someone/eagle3_head"


@pytest.fixture(scope="module")
def uploads(tmp_path_factory):
    """A target with what repositories hold beside a model, and a head."""
    root = tmp_path_factory.mktemp("uploads")
    target = tiny_target()
    write_target(root / "target", target)
    write_head(root / "head", random_head(target.config))
    extra = {
        "modeling_tiny.py": b"raise SystemExit('code of a model ran')",
        "README.md": b"# a model",
        "pytorch_model.bin": b"not needed",
        "consolidated.safetensors": b"not needed",
        "original/config.json": b"{}",
        "training_args.bin": b"a pickle",
        "generation_config.json": b"{}",
        f"{TEMPLATES}/tool_use.jinja": b"{{ tools }}",
        f"{TEMPLATES}/code.py": b"not needed",
    }
    for name, content in extra.items():
        (root / "target" / name).parent.mkdir(exist_ok=True)
        (root / "target" / name).write_bytes(content)
    return root


@pytest.fixture
def hub(uploads, monkeypatch):
    """A Hub with a target and a head."""
    with running_hub() as hub:
        hub.add(TARGET, uploads / "target")
        hub.add(HEAD, uploads / "head")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield hub


@pytest.fixture
def options(tmp_path):
    return HubOptions(download_dir=str(tmp_path / "cache"))


def test_configs_and_weights_are_fetched_and_nothing_else(hub: Hub, options):
    folder = local_path(TARGET, options)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {"config.json", "generation_config.json", "model.safetensors", f"{TEMPLATES}/tool_use.jinja"}
    served = len(hub.served)
    assert local_path(TARGET, options) == folder and len(hub.served) == served, "the cache is used without asking the Hub"


def test_a_config_alone_is_enough_for_plans(hub: Hub, options):
    folder = local_path(TARGET, options, weights=False)
    assert (folder / "config.json").is_file() and not (folder / "model.safetensors").exists()
    assert (local_path(TARGET, options) / "model.safetensors").is_file(), "half a snapshot is not taken for a whole one"


def test_only_the_shards_of_the_index(hub: Hub, options):
    files = hub.repositories[TARGET]
    files["model-00001-of-00001.safetensors"] = files["model.safetensors"]
    files["model.safetensors.index.json"] = b'{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    folder = local_path(TARGET, options)
    assert [file.name for file in folder.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]


def test_bin_files_where_there_is_nothing_else(hub: Hub, options):
    del hub.repositories[TARGET]["model.safetensors"]
    del hub.repositories[TARGET]["consolidated.safetensors"]
    assert (local_path(TARGET, options) / "pytorch_model.bin").is_file()


def test_one_file(hub: Hub, options):
    hub.repositories["org/maps"] = {"freq_8.pt": b"eight"}
    assert local_path("org/maps/freq_8.pt", options).read_bytes() == b"eight"
    with pytest.raises(ValueError, match=r"org/maps has no file freq_9.pt: see http"):
        local_path("org/maps/freq_9.pt", options)


def test_an_interrupted_download_goes_on_where_it_ended(hub: Hub, options):
    weights = hub.repositories[TARGET]["model.safetensors"] = os.urandom(30_000_000)
    hub.break_after = 20_000_000
    folder = local_path(TARGET, options)  # the library tries again at once
    assert (folder / "model.safetensors").read_bytes() == weights
    starts = [first for method, path, first in hub.served if (method, path) == ("GET", "model.safetensors")]
    assert starts[0] == 0 and starts[-1] > 0, starts


def test_only_what_is_missing_needs_room_on_the_disk(hub: Hub, options, monkeypatch):
    files, shards = hub.repositories[TARGET], [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    del files["model.safetensors"]
    files["model.safetensors.index.json"] = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    files[shards[0]], files[shards[1]] = os.urandom(3_000_000), os.urandom(1_000_000)
    last = local_path(TARGET, options) / shards[1]
    last.resolve().unlink()
    last.unlink()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2_000_000))
    folder = local_path(TARGET, options)
    assert [(folder / name).stat().st_size for name in shards] == [3_000_000, 1_000_000]


def test_a_path_that_exists_is_no_name(hub: Hub, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / TARGET).mkdir(parents=True)
    assert str(local_path(TARGET, options)) == TARGET and not is_hub_name(TARGET) and is_hub_name(HEAD) and not hub.served


def test_a_revision_is_for_names_on_the_hub(hub: Hub, options, tmp_path):
    with pytest.raises(ValueError, match="is on this machine: leave out the revision 'v2'"):
        local_path(tmp_path, options._replace(revision="v2"))
    with pytest.raises(ValueError, match="a revision was given, but no model"):
        model_directory(None, options._replace(revision="v2"))
    for draft in (None, "ngram"):
        config = EngineConfig(ngram=draft == "ngram")
        with pytest.raises(ValueError, match=r"draft model was given, but no draft model|needs a draft head"):
            find_files(None, draft, None, None, config, HubOptions(speculative_draft_model_revision="v2"))


@pytest.mark.parametrize(
    "command",
    [
        [plan.main, "--model-path", TARGET, "--no-compile"],
        [convert.main, "--inspect", TARGET],
        [train.main, "run", "--model-path", TARGET, "--out", "head"],
    ],
    ids=["plan", "convert", "train"],
)
def test_commands_take_the_revision_that_is_asked_for(hub: Hub, options, tmp_path, monkeypatch, capsys, command):
    """A commit is one, a version that was never made is named. Training ends before it begins: the model has no tokenizer."""
    commit = hub.commit(TARGET)
    monkeypatch.chdir(tmp_path)
    main, *words = command
    words += ["--download-dir", options.download_dir, "--revision"]
    assert main([*words, "v9"]) == 2
    assert f"{TARGET} has no revision 'v9': see http" in capsys.readouterr().err
    status, (said, error) = main([*words, commit]), capsys.readouterr()
    assert (said and status == 0) or f"{TARGET}@{commit} has no chat template" in error, error
    (snapshot,) = tmp_path.glob("cache/*/snapshots/*")
    assert snapshot.name == commit


@pytest.mark.parametrize(
    "command",
    [[plan.main, "--no-compile", "--model-path", TARGET], [convert.main, TARGET, "converted", "--quiet"]],
    ids=["plan", "convert"],
)
def test_the_head_has_a_revision_of_its_own(hub: Hub, options, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    main, *words = command
    words += ["--download-dir", options.download_dir, "--draft", HEAD, "--speculative-draft-model-revision"]
    assert main([*words, "v9"]) == 2
    assert f"{HEAD} has no revision 'v9': see http" in capsys.readouterr().err
    assert main([*words, hub.commit(HEAD)]) == 0


@pytest.mark.parametrize(
    "name", ["model", "/a/b", "./a/b", "../a", "a/b/c", "a//b", "a/../b", "org/..", "a b/c", "org/name/../x.pt", "é/a"]
)
def test_what_is_no_name_stays_a_path(hub: Hub, options, name):
    assert str(local_path(name, options)).replace("./", "") == name.replace("./", "").replace("//", "/") and not hub.served


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("org/nothing", None, r"org/nothing is not on the Hub, or is private: check the name at http"),
        (HEAD, "v9", r"someone/eagle3_head has no revision 'v9': see http"),
        ("org/gated", None, r"org/gated is gated: accept its conditions at http\S+/org/gated, then log in with `hf auth login`"),
        ("org/empty", None, r"org/empty on the Hub has no config.json$"),
        ("org/ggufs", None, r"no config.json: choose one of its GGUF files, as in org/ggufs/a-Q8_0.gguf"),
        ("org/code", None, r"org/code on the Hub has no weights as safetensors or pytorch_model.bin"),
        ("org/huge", None, r"org/huge has 9313\d\d.\d GiB of weights to download, and \S+ GiB are free: free some space"),
        ("org/config", None, r"org/config: config.json is larger than \d+ MiB"),
        ("org/index", None, r"model.safetensors.index.json has no weight_map from tensor names to file names"),
    ],
)
def test_what_is_not_there_is_one_line(hub: Hub, options, name, revision, message):
    config, weights = {"config.json": b"{}"}, {"model-1.safetensors": b"", "config.json": b"{}"}
    hub.gated.add("org/gated")
    hub.promised = {"model-1.safetensors": 10**15}
    hub.repositories |= {
        "org/gated": config,
        "org/empty": {"README.md": b""},
        "org/ggufs": {"a-Q8_0.gguf": b""},
        "org/code": config | {"modeling.py": b"", "weights.pkl": b"", "../../model.safetensors": b"x", "a/model.safetensors": b"x"},
        "org/huge": weights,
        "org/config": {"config.json": b" " * (65 * 2**20)},
        "org/index": weights | {"model.safetensors.index.json": b"[]" if name != "org/index" else b'{"weight_map": []}'},
    }
    with pytest.raises(ValueError, match=message) as caught:
        local_path(name, options._replace(revision=revision))
    assert "\n" not in str(caught.value)


def test_a_hostile_repository_leaves_nothing(hub: Hub, options, tmp_path):
    """Paths that lead elsewhere, code and pickles: none of them is written anywhere."""
    paths = "../../../escaped.json /escaped.json tokenizer.json/../../escaped.json ..\\model.safetensors"
    hostile = dict.fromkeys([*paths.split(), f"{TEMPLATES}/../../escaped.jinja"], b"x")
    hub.repositories[TARGET] |= hostile | {"tokenizer.py": b"x", "weights.pkl": b"x", "model.safetensors.py": b"x"}
    local_path(TARGET, options)
    written = {path.name for path in tmp_path.rglob("*") if path.is_symlink() or path.parent.name == BRANCH}
    assert written == {"config.json", "generation_config.json", "model.safetensors", "tool_use.jinja"}
    assert not list(tmp_path.parent.rglob("escaped*")) and not list(tmp_path.rglob("*escaped*"))


def test_no_network_is_one_line_and_the_cache_works_without(hub: Hub, options, monkeypatch):
    folder = local_path(TARGET, options)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert local_path(TARGET, options) == folder
    with pytest.raises(ValueError, match=r"someone/eagle3_head is no path here, and http://127.0.0.1:9\S+ can't be reached \(.*"):
        local_path(HEAD, options)


def test_offline_a_warm_cache_works_and_a_cold_one_is_named(hub: Hub, options):
    program = (
        "import sys; from jaxspec.checkpoints.hub import *; print(local_path(sys.argv[1], HubOptions(download_dir=sys.argv[2])))"
    )
    folder = local_path(TARGET, options)

    def offline(name: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", program, name, options.download_dir]
        return subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=120)

    assert offline(TARGET).stdout.strip() == str(folder)
    assert "is not in the cache, and HF_HUB_OFFLINE is set: download it once with HF_HUB_OFFLINE=0" in offline(HEAD).stderr


def test_a_full_disk_is_one_line(hub: Hub, options, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(ValueError, match="does not fit on the disk: free some space, or give another one with --download-dir"):
        local_path(TARGET, options)
    shutil.rmtree(options.download_dir, ignore_errors=True)
