"""Clients of the Responses and the Messages API against our server, whose answer is always the same: thinking, text and a call."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxspec.server.model import ServedModel
from jaxspec.text.answer_parser import REASONING_FORMATS
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.text.tool_formats import TOOL_FORMATS
from tests.clients.conftest import reported
from tests.clients.install import CLIENTS
from tests.server.conftest import serving
from tests.server.fakes import TOOL_TEMPLATE, TREE, FakeEngine, byte_tokenizer

SCRIPTS = Path(__file__).parent / "scripts"
ANSWER = '<think>hm</think>Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\x00'


@pytest.fixture(scope="module")
def agents_server() -> Iterator[str]:
    engine, tokenizer = FakeEngine(), byte_tokenizer(TOOL_TEMPLATE)
    engine.text = ANSWER
    template = ChatTemplate.of_model(tokenizer, stop=("\x00",))
    hermes, qwen = TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"]
    with serving(engine, ServedModel("fake", 4096, TREE, tokenizer, template, tool_format=hermes, reasoning=qwen)) as url:
        yield url


@pytest.mark.parametrize(
    ("name", "script", "types"),
    [
        ("openai2", "responses_checks.py", ["reasoning", "message", "function_call"]),
        ("openai3", "responses_checks.py", ["reasoning", "message", "function_call"]),
        ("anthropic", "anthropic_checks.py", ["thinking", "text", "tool_use"]),
    ],
)
def test_all_ways_of_a_client_agree(agents_server, client, name, script, types):
    report = reported(client(name, "python"), SCRIPTS / script, agents_server)
    assert f"=={report['version']}" in CLIENTS[name][0]
    answer = report["answer"]
    assert answer.pop("usage")[1] == len(ANSWER)
    assert answer == {"types": types, "thinking": "hm", "text": "Wait.", "call": ["weather", {"city": "Paris"}]}
