"""The launch commands of SGLang's page on speculative decoding, word for word but for the module's name and the paths."""

import signal
from pathlib import Path

import pytest

from jaxspec import serve
from jaxspec.commands.serve_options import ServerArguments, parse_arguments
from jaxspec.config import SpecConfig
from jaxspec.server.loading import load
from jaxspec.testing import random_eagle, random_head, random_mtp, tiny_target, write_head, write_target

FREQUENT = Path(__file__).parents[1] / "fixtures/torch_files/freq.pt"
"""FR-Spec's list, as torch saves it: 1504 of 128001 tokens."""
LAUNCHES = {
    "EAGLE-2": """--model llama2 --speculative-algorithm EAGLE --speculative-draft-model-path eagle --speculative-num-steps 3
        --speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --cuda-graph-max-bs 8 --log-level warning""",
    "torch.compile": """--model llama2 --speculative-algorithm EAGLE --speculative-draft-model-path eagle --speculative-num-steps 5
        --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 --mem-fraction 0.6 --enable-torch-compile
        --torch-compile-max-bs 2 --log-level warning""",
    "FR-Spec": f"""--model llama3 --speculative-algorithm EAGLE --speculative-draft-model-path eagle-llama3
        --speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 64
        --speculative-token-map {FREQUENT} --mem-fraction 0.7 --cuda-graph-max-bs 2 --dtype float16 --log-level warning""",
    "EAGLE-3": """--model llama2 --speculative-algorithm EAGLE3 --speculative-draft-model-path eagle3 --speculative-num-steps 5
        --speculative-eagle-topk 8 --speculative-num-draft-tokens 32 --mem-fraction 0.6 --cuda-graph-max-bs 2 --dtype float16
        --log-level warning""",
    "MTP": """--model mimo --host 0.0.0.0 --trust-remote-code --speculative-algorithm EAGLE --speculative-num-steps 1
        --speculative-eagle-topk 1 --speculative-num-draft-tokens 2 --mem-fraction 0.5 --log-level warning""",
}
EXPECTED = {
    "EAGLE-2": ("EAGLE", SpecConfig(3, 4, 16), None, "auto", ["--cuda-graph-max-bs"]),
    "torch.compile": ("EAGLE", SpecConfig(5, 8, 64), 0.6, "auto", ["--enable-torch-compile", "--torch-compile-max-bs"]),
    "FR-Spec": ("EAGLE", SpecConfig(5, 8, 64), 0.7, "float16", ["--cuda-graph-max-bs"]),
    "EAGLE-3": ("EAGLE3", SpecConfig(5, 8, 32), 0.6, "float16", ["--cuda-graph-max-bs"]),
    "MTP": ("EAGLE", SpecConfig(1, 1, 2), 0.5, "auto", ["--trust-remote-code"]),
}
"""Algorithm, tree, share of the memory, dtype, and the options reported to have no effect."""


def launch(name: str) -> ServerArguments:
    return parse_arguments([*LAUNCHES[name].split(), "--port", "30000"])


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_the_command_says_arrives(name: str):
    arguments = launch(name)
    algorithm, spec, mem_fraction, dtype, ignored = EXPECTED[name]
    assert (arguments.algorithm, arguments.spec, arguments.dtype, arguments.port) == (algorithm, spec, dtype, 30000)
    assert arguments.engine.get("mem_fraction") == mem_fraction
    assert [note.partition(" ")[0] for note in arguments.notes] == ignored and not arguments.warnings
    assert (arguments.token_map is not None) == (name == "FR-Spec")
    assert (arguments.draft is None) == (name == "MTP")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models and heads, under the names that the commands use."""
    root = tmp_path_factory.mktemp("models")
    llama2, llama3 = tiny_target(), tiny_target(vocab_size=128_001, num_layers=2)
    mimo = tiny_target(qkv_bias=True)
    write_target(root / "llama2", llama2)
    write_target(root / "llama3", llama3)
    write_target(root / "mimo", mimo, head=random_mtp(mimo.config))
    write_head(root / "eagle", random_eagle(llama2.config))
    write_head(root / "eagle-llama3", random_eagle(llama3.config))
    write_head(root / "eagle3", random_head(llama2.config))
    return root


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_model_and_its_head_are_loaded(name: str, models: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(models)
    llm = load(launch(name))
    algorithm, spec, _, dtype, _ = EXPECTED[name]
    assert llm.head is not None and llm.engine.spec == spec
    assert llm.head.config.algorithm == ("MTP" if name == "MTP" else algorithm)
    assert llm.target.params["embed_tokens"].dtype == ("float32" if dtype == "auto" else dtype)
    assert llm.head.config.draft_vocab_size == {"FR-Spec": 1504, "EAGLE-3": 64}.get(name)


@pytest.mark.parametrize(
    ("flags", "warns"),
    [((), False), (("--host", "0.0.0.0"), True), (("--host", "0.0.0.0", "--api-key", "k"), False), (("--host", "::1"), False)],
    ids=str,
)
def test_a_server_without_a_key_listens_on_loopback_or_warns(monkeypatch, caplog, flags, warns):
    def no_model(_: ServerArguments) -> None:
        raise ValueError("enough")

    monkeypatch.setattr("jaxspec.server.loading.load", no_model)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("jaxspec.serve.configure_logging", lambda _: None)
    assert serve.main(["--port", "0", *flags]) == 2
    assert ("ANYONE WHO REACHES 0.0.0.0 CAN USE THIS SERVER" in caplog.text) == warns


def test_the_default_address_is_loopback():
    with serve.listen(parse_arguments([]).host, 0) as listener:
        assert serve.is_loopback(listener)
