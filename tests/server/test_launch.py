"""The launch commands of SGLang's page on speculative decoding, word for word but for the module's name, and its requests.

The models are tiny ones on a Hub of this machine.
"""

import json
import shutil
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from huggingface_hub import constants

from jaxspec import serve
from jaxspec.commands.serve_loading import load
from jaxspec.commands.serve_options import ServerArguments, parse_arguments
from jaxspec.defaults import BUILT_IN_NAME, BUILT_IN_TARGET
from jaxspec.testing import random_eagle, random_head, random_mtp, tiny_target, write_head, write_target
from jaxspec.tree_shape import TreeShape
from tests.hub import Hub, running_hub
from tests.live_server import running_server
from tests.sets import exhaustive

FREQUENT = Path(__file__).parents[1] / "fixtures/torch_files/freq.pt"
"""FR-Spec's list, as torch saves it: 1504 of 128001 tokens."""
LAUNCHES = {
    "EAGLE-2": """--model meta-llama/Llama-2-7b-chat-hf --speculative-algorithm EAGLE
        --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B --speculative-num-steps 3
        --speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --cuda-graph-max-bs 8 --log-level warning""",
    "torch.compile": """--model meta-llama/Llama-2-7b-chat-hf --speculative-algorithm EAGLE
        --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B --speculative-num-steps 5
        --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 --mem-fraction 0.6 --enable-torch-compile
        --torch-compile-max-bs 2 --log-level warning""",
    "FR-Spec": """--model meta-llama/Meta-Llama-3-8B-Instruct --speculative-algorithm EAGLE
        --speculative-draft-model-path lmsys/sglang-EAGLE-LLaMA3-Instruct-8B --speculative-num-steps 5
        --speculative-eagle-topk 8 --speculative-num-draft-tokens 64
        --speculative-token-map thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt --mem-fraction 0.7 --cuda-graph-max-bs 2
        --dtype float16 --log-level warning""",
    "EAGLE-3": """--model meta-llama/Llama-3.1-8B-Instruct --speculative-algorithm EAGLE3
        --speculative-draft-model-path jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B --speculative-num-steps 5
        --speculative-eagle-topk 8 --speculative-num-draft-tokens 32 --mem-fraction 0.6 --cuda-graph-max-bs 2 --dtype float16
        --log-level warning""",
    "MTP": """--model-path XiaomiMiMo/MiMo-7B-RL --host 0.0.0.0 --trust-remote-code --speculative-algorithm EAGLE
        --speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2 --mem-fraction 0.5
        --log-level warning""",
}
ASKED = {
    "EAGLE-2": "meta-llama/Meta-Llama-3.1-8B-Instruct",
    "torch.compile": "meta-llama/Llama-2-7b-chat-hf",
    "FR-Spec": "meta-llama/Meta-Llama-3-8B-Instruct",
    "EAGLE-3": "meta-llama/Meta-Llama-3.1-8B-Instruct",
    "MTP": "XiaomiMiMo/MiMo-7B-RL",
}
"""The model that the page's request names; not always the one that was launched."""
EXPECTED = {
    "EAGLE-2": ("EAGLE", TreeShape(3, 4, 16), None, "auto", ["--cuda-graph-max-bs"]),
    "torch.compile": ("EAGLE", TreeShape(5, 8, 64), 0.6, "auto", ["--enable-torch-compile", "--torch-compile-max-bs"]),
    "FR-Spec": ("EAGLE", TreeShape(5, 8, 64), 0.7, "float16", ["--cuda-graph-max-bs"]),
    "EAGLE-3": ("EAGLE3", TreeShape(5, 8, 32), 0.6, "float16", ["--cuda-graph-max-bs"]),
    "MTP": ("EAGLE", TreeShape(1, 1, 2), 0.5, "auto", ["--trust-remote-code"]),
}
"""Algorithm, tree, share of the memory, dtype, and the options reported to have no effect."""


def launch(name: str) -> ServerArguments:
    return parse_arguments([*LAUNCHES[name].split(), "--port", "30000"])


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_the_command_says_arrives(name: str):
    arguments = launch(name)
    algorithm, spec, mem_fraction, dtype, ignored = EXPECTED[name]
    assert (arguments.algorithm, arguments.tree, arguments.dtype, arguments.port) == (algorithm, spec, dtype, 30000)
    assert arguments.engine.get("mem_fraction") == mem_fraction
    assert [note.partition(" ")[0] for note in arguments.notes] == ignored and not arguments.warnings
    assert (arguments.token_map is not None) == (name == "FR-Spec")
    assert (arguments.draft is None) == (name == "MTP")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory):
    """Tiny models and heads, under the names that the commands use. Their tokenizer is the built-in model's."""
    root = tmp_path_factory.mktemp("uploads")
    llama2, llama3 = tiny_target(vocab_size=4096), tiny_target(vocab_size=128_001)
    mimo = tiny_target(vocab_size=4096, qkv_bias=True)
    targets = {
        "meta-llama/Llama-2-7b-chat-hf": write_target(root / "llama2", llama2),
        "meta-llama/Llama-3.1-8B-Instruct": write_target(root / "llama3.1", llama2),
        "meta-llama/Meta-Llama-3-8B-Instruct": write_target(root / "llama3", llama3),
        "XiaomiMiMo/MiMo-7B-RL": write_target(root / "mimo", mimo, head=random_mtp(mimo.config)),
    }
    for folder in targets.values():
        for file in BUILT_IN_TARGET.glob("tokenizer*.json"):
            shutil.copy(file, folder)
    heads = {
        "lmsys/sglang-EAGLE-llama2-chat-7B": write_head(root / "eagle", random_eagle(llama2.config)),
        "lmsys/sglang-EAGLE-LLaMA3-Instruct-8B": write_head(root / "eagle-llama3", random_eagle(llama3.config)),
        "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B": write_head(root / "eagle3", random_head(llama2.config)),
    }
    with running_hub() as hub:
        for name, folder in (targets | heads).items():
            hub.add(name, folder)
        hub.repositories["thunlp/LLaMA3-Instruct-8B-FR-Spec"] = {"freq_32768.pt": FREQUENT.read_bytes()}
        yield hub


@pytest.mark.parametrize("name", [exhaustive(name) if name == "torch.compile" else name for name in LAUNCHES])
def test_the_model_and_its_head_are_loaded(name: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    llm = load(launch(name))
    algorithm, spec, _, dtype, _ = EXPECTED[name]
    assert llm.head is not None and llm.engine.tree == spec
    assert llm.head.config.algorithm == ("MTP" if name == "MTP" else algorithm)
    assert llm.target.params["embed_tokens"].dtype == ("float32" if dtype == "auto" else dtype)
    assert llm.head.config.draft_vocab_size == {"FR-Spec": 1504, "EAGLE-3": 64}.get(name)


@pytest.mark.parametrize("name", [*map(exhaustive, LAUNCHES)])
def test_the_pages_request_is_answered(name: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From the command to the answer: the model is downloaded, served by the name as given, and asked by the name of the page."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    flags = LAUNCHES[name].replace("--log-level warning", "").replace("--host 0.0.0.0", "").split()
    few = ("--compile-ahead", "first", "--speculative-request-trees", "none")
    with running_server(tmp_path, *flags, *few, optimized=False) as server:
        body = {"model": ASKED[name], "messages": [{"role": "user", "content": "List 3 countries."}], "temperature": 0}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"max_tokens": 8}, timeout=300)
        answer = response.json()
        assert response.status_code == 200 and answer["usage"]["completion_tokens"] == 8, answer
        assert answer["model"] == flags[1] == httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        tokenizer = Path(httpx.get(f"{server.url}/get_model_info").json()["tokenizer_path"])
        assert (tokenizer / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("flags", "warns"),
    [((), False), (("--host", "0.0.0.0"), True), (("--host", "0.0.0.0", "--api-key", "k"), False), (("--host", "::1"), False)],
    ids=str,
)
@pytest.mark.parametrize("servers", ["1", "2"])
def test_a_server_without_a_key_listens_on_loopback_or_warns(monkeypatch, caplog, flags, warns, servers):
    def no_model(*_: object) -> None:
        raise ValueError("enough")

    for name in ("jaxspec.commands.serve_loading.load", "jaxspec.serve.serve_replicas"):
        monkeypatch.setattr(name, no_model)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("jaxspec.serve.configure_logging", lambda _: None)
    assert serve.main(["--port", "0", "--dp-size", servers, *flags]) == 2
    assert ("ANYONE WHO REACHES 0.0.0.0 CAN USE THIS SERVER" in caplog.text) == warns


def test_a_port_belongs_to_one_server_while_its_model_loads():
    with serve.listen("127.0.0.1", 0) as listener, pytest.raises(OSError):
        serve.listen("127.0.0.1", listener.getsockname()[1])


def test_a_group_of_servers_finds_out_at_once_that_its_port_is_taken(monkeypatch, capsys):
    for name in ("signal.signal", "jaxspec.serve.configure_logging"):
        monkeypatch.setattr(name, lambda *_: None)
    monkeypatch.setattr("jaxspec.serve.serve_replicas", lambda *_: pytest.fail("too late"))
    with serve.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert serve.main(["--dp-size", "2", "--port", str(port)]) == 1
        assert serve.main(["--dp-size", "2", "--port", str(port), "--host", "127.0.0..1"]) == 1
    taken, wrong = capsys.readouterr().err.splitlines()
    assert f"error: can't listen on 127.0.0.1:{port} (Address already in use): choose another" in taken
    assert f"error: can't listen on 127.0.0..1:{port} (not a valid host name): choose another" in wrong


def test_a_name_with_several_addresses_means_the_ipv4_one(monkeypatch):
    hosts = ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))
    first, second = ((kind, socket.SOCK_STREAM, 0, "", (host, 0)) for kind, host in hosts)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [first, second])
    with serve.listen("localhost", 0) as listener:
        assert listener.family == socket.AF_INET


@pytest.mark.parametrize(
    ("name", "tokenizer", "template", "path"),
    [
        ("smollm2", object(), object(), "/v1/chat/completions"),
        ("base", object(), None, "/v1/completions"),
        (BUILT_IN_NAME, object(), object(), "/v1/completions"),
        ("ids", None, None, "/generate"),
    ],
)
def test_the_start_suggests_a_request_that_fits_the_model(name, tokenizer, template, path):
    command = serve.example(serve.Loaded(SimpleNamespace(name=name, tokenizer=tokenizer), template, {}))
    address, _, body = command.partition(" ")
    assert address == path and json.loads(body.split("-d ")[1].strip("'"))
