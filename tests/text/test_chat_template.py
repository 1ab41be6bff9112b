"""Rendered conversations equal those of transformers, and a hostile template can only fail."""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from jaxspec.child_process import ChildProcess
from jaxspec.text import chat_template
from jaxspec.text.chat_formats import CHAT_FORMATS
from jaxspec.text.chat_template import PROCESSES, ChatTemplate, RenderError
from jaxspec.text.tokenizer import load_tokenizer
from jaxspec.text.tool_formats import takes_tools
from tests.server.conftest import wait_until
from tests.server.fakes import byte_tokenizer
from tests.server.templates import ATTACKS, QWEN_3, WELL_KNOWN

WORKER = chat_template.__file__
USER = [{"role": "user", "content": "hi"}]
SECONDS = 1.0
ON_DEMAND = "".join(
    f"{{% if messages[0].content == '{number}' %}}{{% set messages = [{{'content': 'hi'}}] %}}{attack}{{% endif %}}"
    for number, attack in enumerate(ATTACKS.values())
)
"""The attack of the number that the first message says."""


def attack(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": str(list(ATTACKS).index(name))}]


@pytest.fixture(scope="module")
def victim() -> Iterator[ChatTemplate]:
    with ChatTemplate(ON_DEMAND + "{{ messages[0].content }}", {}, "test", seconds=SECONDS) as template:
        yield template


def has_ended(pid: int) -> bool:
    """True also for a zombie, whose parent has not waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def children() -> set[int]:
    """The pids of this process's children that render templates or are zombies."""
    found = set()
    for line in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            for pid in map(int, line.read_text().split()):
                if has_ended(pid) or WORKER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(pid)
    return found


@pytest.fixture
def alone() -> Iterator[set[int]]:
    """The children that were there before; none may be left of the test's own."""
    before = children()
    yield before
    assert children() <= before


# What it renders


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    made = byte_tokenizer(WELL_KNOWN[name])
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return made


@pytest.fixture(scope="module")
def well_known() -> Iterator[dict[str, ChatTemplate]]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(ChatTemplate.of_model(tokenizer(name))) for name in WELL_KNOWN}


CONTENTS = st.one_of(st.text(max_size=30), st.sampled_from(["<think>\na\n</think>\n\nb", "{{ 7 * 7 }}", " \n x \n ", "<|im_end|>"]))
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": CONTENTS}, optional={"name": st.text(max_size=5)}
)
ALTERNATING = st.lists(CONTENTS, min_size=1, max_size=5).map(
    lambda contents: [{"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)]
)


@given(name=st.sampled_from(sorted(WELL_KNOWN)), messages=st.lists(MESSAGES, min_size=1, max_size=6) | ALTERNATING)
@example(name="ChatML", messages=[{"role": "user", "content": "{{ 7 * 7 }}"}])
@settings(max_examples=200)
def test_the_text_is_that_of_transformers(well_known: dict[str, ChatTemplate], name: str, messages: list[dict[str, str]]):
    try:
        expected = tokenizer(name).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        with pytest.raises(RenderError, match="can't render them") as refusal:
            well_known[name].render(messages)
        assert error.message[:100] in str(refusal.value)
    else:
        assert well_known[name].render(messages) == expected


@given(value=st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=9)))
@settings(max_examples=30)
def test_options_are_those_of_transformers(well_known: dict[str, ChatTemplate], value: bool | float | str):
    expected = tokenizer("Qwen 3").apply_chat_template(USER, add_generation_prompt=True, tokenize=False, enable_thinking=value)
    assert well_known["Qwen 3"].render(USER, {"enable_thinking": value}) == expected
    expected = tokenizer("Llama 3.1").apply_chat_template(USER, add_generation_prompt=True, tokenize=False, date_string=str(value))
    assert well_known["Llama 3.1"].render(USER, {"date_string": str(value)}) == expected


def test_an_option_changes_the_text(well_known: dict[str, ChatTemplate]):
    thinking, silent = (well_known["Qwen 3"].render(USER, options) for options in ({}, {"enable_thinking": False}))
    assert silent == thinking + "<think>\n\n</think>\n\n"


OURS = ["messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template", "bos_token", "eos_token"]


@pytest.mark.parametrize("name", [*OURS, "pad_token", "_x", "enable_thinkin", "loop", "self", "range", "é", "x" * 9999])
def test_other_options_are_refused_by_name(name: str):
    reads_all = "{{ messages, tools, documents, add_generation_prompt, tokenize, _x, chat_template, bos_token, pad_token }}"
    with ChatTemplate(reads_all + QWEN_3, {"eos_token": "</s>"}, "test") as template:
        with pytest.raises(RenderError) as error:
            template.render(USER, {"enable_thinking": True, name: 1})
        copy = pickle.loads(pickle.dumps(error.value))  # as a pool of processes does, which would hang
        assert (copy.status, copy.param, str(copy)) == (400, "chat_template_kwargs", str(error.value))
        assert name[:100] in str(error.value) and len(str(error.value)) < 400
        # All names that the template may read from outside:
        assert "its options: content, enable_thinking, reasoning_content" in str(error.value)


def test_today():
    with ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, "test") as template:
        before, text, after = time.strftime("%d %b %Y"), template.render(USER), time.strftime("%d %b %Y")
    assert text in (before, after)


def test_many_at_once(victim: ChatTemplate):
    """Everyone gets its own text."""

    def work(content: str) -> None:
        for _ in range(20):
            assert victim.render([{"role": "user", "content": content}]) == content

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, map("conversation {}".format, range(8))))
    assert victim.render(USER) == "hi"


# Where it comes from


def test_no_template():
    assert ChatTemplate.of_model(None) is None
    assert ChatTemplate.of_model(byte_tokenizer(chat_template=None)) is None


def test_the_given_one_wins():
    with ChatTemplate.of_model(byte_tokenizer(), "other {{ messages[0].content }}") as template:
        assert (template.text, template.render(USER)) == ("other {{ messages[0].content }}", "other hi")
    with pytest.raises(ValueError, match=r"^mine.jinja can't be used: the model has no tokenizer"):
        ChatTemplate.of_model(None, "x", "mine.jinja")


def test_a_developers_message_is_a_systems():
    messages = [{"role": "developer", "content": "short"}, *USER]
    qwen = "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.role }} {{ m.content }} {% endif %}{% endfor %}"
    for text, expected in ((qwen, "system short user hi "), ("{# developer #}" + qwen, "user hi ")):
        with ChatTemplate(text, {}, "t") as template:
            assert template.render(messages) == expected, "unless the template knows the role"
    for name, chat_format in CHAT_FORMATS.items():
        with ChatTemplate(chat_format.template, {}, name) as template:
            assert template.render(messages) == template.render([{"role": "system", "content": "short"}, *USER])


@pytest.mark.parametrize(
    ("start", "end"), [("", ""), ("\n", "\n"), ("  ", "  "), ("  {% if 1 %}", "\n\n "), ("{%- set x = 1 -%} \n", "{#- #}\n")]
)
def test_of_several_the_default_or_that_for_tools(start: str, end: str):
    made, closed = byte_tokenizer(), "{% endif %}" if "if" in start else ""
    texts = {name: f"{start}{name} {{{{ {name} }}}}{closed}{end}" for name in ("tool_use", "default")}
    made.chat_template = texts | {"rag": "documents"}
    with ChatTemplate.of_model(made) as template:
        assert template.options == ["default", "tool_use"] and takes_tools(template.text)
        for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
            expected = made.apply_chat_template(USER, tools=tools, tokenize=False, tool_use=7)
            assert template.render(USER, {"tool_use": 7}, tools=tools) == expected


def test_of_several_without_a_default_none():
    made = byte_tokenizer()
    made.chat_template = {"tool_use": "tools", "rag": "documents"}
    with pytest.raises(ValueError, match="named tool_use, rag, but no default"):
        ChatTemplate.of_model(made)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\nb {% if x %}", "line 2: Unexpected end of template"),
        ("{{ messages", "line 1: "),
        ("{% tool %}", "unknown tag 'tool'"),
        ("{{ x | frobnicate }}", "No filter named 'frobnicate'"),
        ("{{" + "(" * 999 + "1" + ")" * 999 + "}}", "recursion"),
    ],
)
def test_a_wrong_one_is_refused_before_any_request(alone: set[int], text: str, said: str, tmp_path: Path):
    byte_tokenizer(text).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not a valid chat template: ") as error:
        ChatTemplate.of_model(load_tokenizer(tmp_path))
    assert said in str(error.value)
    with pytest.raises(ValueError, match=r"^mine\.jinja is not a valid chat template: "):
        ChatTemplate.of_model(byte_tokenizer(), text, "mine.jinja")


# What it can't do


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_fail_without_affecting_other_conversations(victim: ChatTemplate, name: str):
    started = time.monotonic()
    with pytest.raises(RenderError, match="the model's chat template can't render them: ") as error:
        victim.render(attack(name))
    assert time.monotonic() - started < 3 * SECONDS
    assert (error.value.status, error.value.param) == (400, "messages")
    assert len(str(error.value)) < 300 and "/" not in str(error.value).replace("'/etc/passwd'", "")
    assert victim.render(USER) == "hi"


def test_others_are_rendered_meanwhile(victim: ChatTemplate):
    with victim._process(), victim._process():
        pass  # both are started
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(victim.render, attack("nested loops"))
        time.sleep(SECONDS / 5)
        assert victim.render(USER) == "hi" and not slow.done()
        with pytest.raises(RenderError, match="more than 1 seconds"):
            slow.result(20)


def test_waiting_for_a_process_has_the_same_limit(victim: ChatTemplate):
    with contextlib.ExitStack() as stack:
        for _ in range(PROCESSES):
            stack.enter_context(victim._process())
        started = time.monotonic()
        with pytest.raises(RenderError) as error:
            victim.render(USER)
        assert SECONDS <= time.monotonic() - started < 2 * SECONDS
    assert (error.value.status, error.value.param) == (503, None)
    assert victim.render(USER) == "hi"


def test_what_is_nested_too_deeply_is_refused_before_a_process_is_taken(victim: ChatTemplate):
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    before = children()
    with pytest.raises(RenderError, match="nested too deeply") as error:
        victim.render(USER, tools=[deep])
    assert (error.value.status, children()) == (400, before)


def test_a_stopped_process_is_replaced(alone: set[int]):
    with ChatTemplate(ON_DEMAND, {}, "test", seconds=SECONDS) as template:
        [first] = children() - alone
        template.render(USER)
        assert children() - alone == {first}
        with pytest.raises(RenderError):
            template.render(attack("nested loops"))
        assert children() - alone == set()
        template.render(USER)
        [second] = children() - alone
        os.kill(second, signal.SIGKILL)  # as the system does when memory is short
        wait_until(lambda: has_ended(second))
        template.render(USER)
        [third] = children() - alone
    assert len({first, second, third}) == 3


def test_a_process_that_ends_meanwhile(alone: set[int]):
    with ChatTemplate(ON_DEMAND, {}, "test", seconds=10) as template:
        [pid] = children() - alone
        timer = threading.Timer(0.3, os.kill, [pid, signal.SIGKILL])
        timer.start()
        with pytest.raises(RenderError, match="its process ended"):
            template.render(attack("nested loops"))
        timer.join()


def test_output_limit():
    with ChatTemplate("{{ messages[0].content }}{{ messages[0].content }}", {}, "test", max_characters=100) as template:
        assert template.render([{"role": "user", "content": "\x01" * 50}]) == "\x01" * 100
        with pytest.raises(RenderError, match="more than 100 characters"):
            template.render([{"role": "user", "content": "x" * 51}])


def test_closing_ends_what_runs_and_may_be_repeated(alone: set[int]):
    template = ChatTemplate(ON_DEMAND, {}, "test", seconds=SECONDS)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(template.render, attack("nested loops"))
        time.sleep(SECONDS / 5)
        template.close()
        template.close()
        assert isinstance(slow.exception(20), RenderError)
    assert children() <= alone


# The process


def test_the_process_imports_next_to_nothing():
    code = f"import runpy, sys; runpy.run_path({WORKER!r}); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "jinja2" in modules and not {"jax", "numpy", "transformers"} & set(modules)


def test_its_limits_are_set(alone: set[int]):
    with ChatTemplate("", {}, "test"):
        [pid] = children() - alone
        limits = Path(f"/proc/{pid}/limits").read_text()
    for name, most in {"address space": 2**29, "file size": 0, "processes": 0, "core file size": 0}.items():
        [line] = [line for line in limits.splitlines() if line.startswith(f"Max {name} ")]
        assert line.split(f"Max {name} ")[1].split()[:2] == [str(most)] * 2


def test_signals_for_the_server_are_not_for_the_process(alone: set[int]):
    with ChatTemplate(ON_DEMAND + "fine", {}, "test") as template:
        [pid] = children() - alone
        assert os.getpgid(pid) == pid  # Ctrl-C reaches the terminal's group only
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        time.sleep(0.1)
        assert template.render(USER) == "fine"
        assert children() - alone == {pid}


KILLED_SERVER = """\
import os, signal
from jaxspec.text import chat_template
process = chat_template.ChildProcess(chat_template.__file__)
process.ask({"template": "", "variables": {}, "max_characters": 9}, 20, 999)
print(process._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_the_server():
    server = subprocess.run([sys.executable, "-c", KILLED_SERVER], capture_output=True, text=True, check=False)
    assert (server.returncode, server.stderr) == (-signal.SIGKILL, "")
    pid = int(server.stdout)
    wait_until(lambda: has_ended(pid))


def test_an_alarm_ends_it_while_it_renders():
    code = "from jaxspec import child_process as it; it.ORPHAN_SECONDS = 1; from jaxspec.text.chat_template import main; main()"
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs.fileno())
    with ours:
        for question in ({"template": ATTACKS["nested loops"], "max_characters": 9, "variables": {}}, {"variables": {}}):
            ours.sendall(json.dumps(question).encode() + b"\n")
            assert "template" not in question or ours.recv(999) == b'{"names": []}\n'
    try:
        assert process.wait(20) == -signal.SIGALRM
    finally:
        process.kill()


def test_it_ends_silently_when_its_reader_is_gone():
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-P", WORKER], stdin=theirs.fileno(), stderr=subprocess.PIPE)
    with ours:
        ours.sendall(b'{"template": "", "variables": {}, "max_characters": 9}\n')
    assert process.communicate(timeout=20)[1] == b"" and process.returncode == 0


def test_an_answer_without_end_is_cut():
    process = ChildProcess(WORKER)
    process.ask({"template": "{{ x }}{{ raise_exception(x) }}", "variables": {}, "max_characters": 2000}, 20, 9999)
    assert len(process.ask({"variables": {"x": "y" * 1500}}, 20, 9999)["error"]) == 1000
    process.ask({"template": "{{ x }}", "variables": {}, "max_characters": 2000}, 20, 9999)
    assert process.ask({"variables": {"x": "y" * 1500}}, 20, 9999) == {"text": "y" * 1500}
    with pytest.raises(ConnectionError):
        process.ask({"variables": {"x": "y" * 1500}}, 20, 999)
    process.close()
