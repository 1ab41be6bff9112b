"""jaxspec collect-env: what it tells, and the secrets that it keeps."""

import json
import subprocess

import jax
import pytest

from jaxspec.commands import collect_env
from jaxspec.commands.collect_env import as_text, checkout, main, output, plain_name, variables
from jaxspec.load import load_models


def test_the_report_has_every_section_in_both_forms(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXSPEC_API_KEY", "hidden-value")
    backend = jax.default_backend()  # starts it, before there are flags that XLA does not know
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_example=1 " * 100)
    (tmp_path / "~roken-1.0.dist-info").mkdir()  # damaged: it has no METADATA
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["jax"] == jax.__version__ and found["devices"][0]["platform"] == backend
    assert found["system"]["cores"] >= 1 and found["jaxspec"]["version"]
    assert found["environment"]["JAXSPEC_API_KEY"] == "(set)" and len(found["environment"]["XLA_FLAGS"]) == 500
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"{title.replace('_', ' ')}:\n" in text for title in found)
    assert "hidden-value" not in text + json.dumps(found)


@pytest.mark.parametrize("name", ["JAXSPEC_API_KEY", "JAXSPEC_ADMIN_API_KEY", "JAX_auth_token", "XLA_PASSWORD"])
def test_secrets_are_only_said_to_be_set(name):
    assert variables({name: "abc"}) == {name: "(set)"}


def test_only_variables_that_matter_are_told():
    environment = {"JAX_PLATFORMS": "cpu", "HOME": "/home/me", "AWS_SECRET": "x", "CUDA_VISIBLE_DEVICES": "0", "MY_JAX_THING": "y"}
    assert variables(environment) == {"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize(
    ("error", "said"), [(RuntimeError("no\n driver"), "no driver"), (AssertionError(), "no such platform is here")]
)
def test_devices_that_fail_are_part_of_the_report_and_an_error_elsewhere(monkeypatch, error, said):
    def fails() -> None:
        raise error

    monkeypatch.setattr(jax, "devices", fails)
    (found,) = collect_env.devices()
    assert found["error"].startswith(f"JAX finds no devices: {said} (JAX_PLATFORMS is ")
    with pytest.raises(ValueError, match=said):
        load_models()


def test_a_clone_has_a_commit(tmp_path):
    assert checkout(tmp_path) == {}
    if output("git", "--version") is None:
        pytest.skip("git is not installed")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    (tmp_path / "new").touch()
    found = checkout(tmp_path)
    assert len(found["commit"]) == 40 and found["changed_files"] == 1


def test_a_command_that_is_missing_or_fails_says_nothing():
    assert output("no-such-program-here") is None
    assert output("git", "no-such-command") is None


def test_sizes_and_names_are_for_people():
    assert as_text("memory_bytes", 3 << 30) == "3.00 GiB" and as_text("used_bytes", 3 << 19) == "1.5 MiB"
    assert as_text("", {"kind": "H100", "limit_bytes": 1 << 30}) == "kind H100, limit 1.00 GiB"
    assert [plain_name(name) for name in ("memory_bytes", "changed_files", "XLA_FLAGS", "bytes")] == [
        "memory", "changed files", "XLA_FLAGS", "size",
    ]  # fmt: skip
