"""jaxspec chat: the conversation, its commands and figures, over a scripted source; and its command line."""

import io
import json
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

from jaxspec.cli import main
from jaxspec.commands import chat, chat_loop
from jaxspec.commands.chat_loop import ChatLoop, Figures, Piece, Wishes
from jaxspec.commands.chat_screen import THINKING, Screen
from jaxspec.engine.output import DRAFT, PREFILL
from jaxspec.tree_shape import PLAIN, TreeShape

SYSTEM = {"role": "system", "content": "be brief"}


class Script(Screen):
    """A terminal whose user types these lines; CTRL_C raises."""

    def __init__(self, lines: Iterable[str]):
        super().__init__()
        self.lines, self.shown, self.notes = iter(lines), "", list[str]()
        self.why_no_colours = ""

    def read(self) -> str | None:
        line = next(self.lines, None)
        if line == CTRL_C:
            raise KeyboardInterrupt
        return line

    def show(self, spans: Iterable[tuple[str, str]]) -> None:
        self.shown += "".join(text for text, _ in spans)

    def end_of_answer(self) -> None:
        self.shown += "\n"

    def note(self, text: str) -> None:
        self.notes.append(text)


CTRL_C = "ctrl-c"


class Echo:
    """Answers with what it was asked, in two pieces, or raises what it shall between them."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.trees: list[TreeShape | None] = []
        self.between: BaseException | None = None
        self.closed = 0

    def about(self) -> dict[str, str]:
        return {"model": "echo"}

    def prepare(self, tree: TreeShape | None) -> None:
        if tree == TreeShape(9, 1):
            raise ValueError("too deep")

    def answer(self, messages, wishes: Wishes) -> Generator[Piece]:
        self.asked.append(list(messages))
        self.trees.append(wishes.tree)
        question = messages[-1]["content"]
        try:
            yield Piece(((f"<{question}", PREFILL),), 1)
            if self.between is not None:
                raise self.between
            yield Piece(((">", DRAFT), ("hm", THINKING)), 3, 1, 3, "stop")
        finally:
            self.closed += 1


def chatting(*lines: str, source: Echo | None = None, system: str | None = None) -> tuple[ChatLoop, Script, Echo]:
    source, screen = source or Echo(), Script(lines)
    times = iter(range(1000))
    spoken = ChatLoop(source, screen, Wishes(), system, clock=lambda: next(times) / 2)
    spoken.run()
    return spoken, screen, source


def test_a_question_comes_with_what_was_said_before():
    spoken, screen, source = chatting("one", "two", system="be brief")
    first = [{"role": "user", "content": "one"}]
    second = [*first, {"role": "assistant", "content": "<one>"}, {"role": "user", "content": "two"}]
    assert source.asked == [[SYSTEM, *first], [SYSTEM, *second]] and screen.shown == "<one>hm\n<two>hm\n"
    assert spoken.messages[-1] == {"role": "assistant", "content": "<two>"}, "what it thinks is not said"


def test_the_figures_of_an_answer_and_of_all():
    """A clock that goes on half a second with every look: one at the question, one at each piece."""
    _, screen, _ = chatting("one", "two", "/stats")
    line = "4 tokens, 6.0 tokens/s, 3.00 tokens per forward of the target, first token after 0.50 s"
    assert screen.notes[:2] == [line, line]
    assert f"all answers   8{line[1:]}" in screen.notes[2] and "model         echo" in screen.notes[2]
    assert str(Figures()) == "0 tokens"


def test_an_answer_that_is_stopped_stays_and_the_next_question_is_answered():
    source = Echo()
    source.between = KeyboardInterrupt()
    spoken, screen, _ = chatting("one", source=source)
    assert spoken.messages == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "<one"}]
    assert screen.notes == ["1 token, first token after 0.50 s, stopped"] and source.closed == 1


def test_what_was_shown_is_remembered_wherever_ctrl_c_falls():
    class Interrupted(Script):
        def show(self, spans: Iterable[tuple[str, str]]) -> None:
            super().show(spans)
            raise KeyboardInterrupt

    screen = Interrupted(["one"])
    spoken = ChatLoop(Echo(), screen, Wishes())
    spoken.run()
    assert screen.shown == "<one\n" and spoken.messages[-1] == {"role": "assistant", "content": "<one"}


def test_an_answer_that_fails_is_no_part_of_the_conversation():
    source = Echo()
    source.between = ValueError("no more")
    spoken, screen, _ = chatting("one", "two", source=source)
    assert spoken.messages == [] and screen.notes == ["error: no more"] * 2 and source.closed == 2


def test_without_a_reader_nothing_more_is_asked():
    source = Echo()
    source.between = BrokenPipeError()
    with pytest.raises(BrokenPipeError):
        chatting("one", "two", source=source)
    assert len(source.asked) == 1


def test_a_line_that_can_not_be_decoded_takes_no_other_with_it(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\nb\n"), "utf-8"))
    screen = Screen()
    assert [screen.read() for _ in range(3)] == ["a\udcff\n", "b\n", None]


def test_trees_and_plain_decoding():
    _, screen, source = chatting("/tree 3/1/4", "a", "/plain", "b", "/tree 9/1/10", "c", "/tree x", "/tree", "d")
    assert source.trees == [TreeShape(3, 1), PLAIN, PLAIN, None]
    notes = [note for note in screen.notes if not note.startswith("4 tokens")]
    assert notes[:3] == ["drafts: tree 3/1/4", "drafts: none, plain decoding", "error: too deep"]
    assert notes[3].startswith("error: ") and notes[4] == "drafts: the model's own"


def test_settings_and_forgetting(monkeypatch):
    warmth = ("/temperature 0.5", "/temperature -1", "/temperature hot")
    spoken, screen, source = chatting(*warmth, "a", "/system be brief", "/clear", "b")
    assert spoken.wishes.temperature == 0.5 and source.asked[-1] == [SYSTEM, {"role": "user", "content": "b"}]
    assert "error: /temperature must be a number between 0" in screen.notes[1] and "takes a number" in screen.notes[2]
    spoken, screen, _ = chatting("/temperature 0.5", "/temperature", "/colour", "/system x", "/system")
    assert spoken.wishes.temperature is None and spoken.wishes.shows_drafts and spoken.system is None
    assert "accepted draft" in screen.notes[2]


def test_without_colours_the_command_says_why(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert Screen().why_no_colours == "NO_COLOR is set"
    monkeypatch.delenv("NO_COLOR")
    assert Screen().why_no_colours == "the output is not a terminal"


def test_a_conversation_is_saved_and_no_file_is_written_over(tmp_path: Path):
    file = tmp_path / "chat.json"
    _, screen, _ = chatting("one", f"/save {file}", f"/save {file}", "/save", "/save ~nobody-here/x", system="be brief")
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "<one>"}]
    assert json.loads(file.read_text()) == {"messages": [SYSTEM, *said]}
    assert screen.notes[1] == f"written: {file}" and "File exists" in screen.notes[2] and "needs the name" in screen.notes[3]
    assert "No such file or directory: '~nobody-here/x'" in screen.notes[4]


def test_help_lists_every_command_and_a_wrong_one_is_no_question():
    spoken, screen, source = chatting("/help", "/stat", "/x y", "/clear all", " /etc/hosts?")
    assert all(f"/{name}" in screen.notes[0] for name in spoken.commands) and len(spoken.commands) == 10
    assert "did you mean /stats?" in screen.notes[1] and "/help lists them" in screen.notes[2]
    assert "takes nothing" in screen.notes[3]
    assert [asked[-1]["content"] for asked in source.asked] == ["/etc/hosts?"]


def test_ctrl_c_clears_the_line_and_leaves_the_second_time():
    assert chatting(CTRL_C, "a", CTRL_C, CTRL_C, "b")[2].asked == [[{"role": "user", "content": "a"}]]
    assert chatting("/quit", "a")[2].asked == []


def test_characters_that_command_a_terminal_are_not_shown(capsys):
    Screen().show([("a\tb\n\x1b[2J\x07c\x9bd", "")])
    assert capsys.readouterr().out == "a\tb\n\ufffd[2J\ufffdc\ufffdd"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("m --model-path m", "the model was given twice"),
        ("m --temperature -1", "--temperature must be a number between 0"),
        ("m --url http://127.0.0.1:9", "leave out 'm'"),
        ("--url http://127.0.0.1:9 --dtype float32", "--dtype can't be combined with --url"),
        ("--url http://127.0.0.1:9", "no server answers at http://127.0.0.1:9"),
        ("--url ftp://x", "--url must be like"),
        ("--url http://me:secret@127.0.0.1:9", "--url must be like http://127.0.0.1:30000, without user, password or query"),
        ("smolm2", "did you mean smollm2?"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, said: str, capsys):
    assert main(["chat", *arguments.split()]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("jaxspec chat: error: ") and said in error and "secret" not in error


def test_without_a_name_it_is_the_small_chat_model_if_that_is_installed(monkeypatch):
    options = chat.make_parser().parse_args([])
    monkeypatch.setattr(chat, "smollm2_file", lambda: Path("there"))
    assert chat.chosen_model(options) == "smollm2"
    monkeypatch.setattr(chat, "smollm2_file", lambda: None)
    with pytest.raises(ValueError, match=r"completes Python code .* pip install"):
        chat.chosen_model(options)


def test_why_an_answer_ended_is_said_where_it_matters():
    assert "length" in chat_loop.ENDS and "stop" not in chat_loop.ENDS
