"""Events of a stream come out the same however the network cuts its bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.client import EventParser, FailedRequest

LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8)
BREAKS = st.sampled_from(["\n", "\r\n", "\r"])


@given(st.lists(st.tuples(st.lists(LINES, min_size=1, max_size=3), BREAKS, st.booleans()), max_size=5), st.data())
def test_any_cut_of_the_bytes_gives_the_same_events(events, data):
    stream = b"".join(written(lines, end, has_comment) for lines, end, has_comment in events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    parts = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    parser = EventParser()
    assert [event for part in parts for event in parser.feed(part)] == ["\n".join(lines) for lines, _, _ in events]


def written(lines: list[str], end: str, has_comment: bool) -> bytes:
    comment = f": keep-alive{end}" if has_comment else ""
    return (comment + "".join(f"data: {line}{end}" for line in lines) + end).encode()


@given(st.binary(max_size=60), st.integers(1, 7))
def test_any_bytes_give_the_same_events_whole_and_in_parts(stream, size):
    in_parts, whole = EventParser(), EventParser()
    parts = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [event for part in parts for event in in_parts.feed(part)] == whole.feed(stream)


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        ("data: a\n\ndata: b\r\n\r\ndata: c\r\r", ["a", "b", "c"]),
        ("data:a\n\ndata:  a\n\n", ["a", " a"]),
        (": comment\n\nevent: x\nid: 1\ndata: a\nretry: 5\n\n", ["a"]),
        ("data: a\ndata\ndata: b\n\n", ["a\n\nb"]),
        ("event: without data\n\n\n\n", []),
        ("data: cut off", []),
        ("data: cut off\n", []),
        ("\ufeffdata: a\n\n", ["a"]),
        ("database: x\n\ndata: [DONE]\n\n", ["[DONE]"]),
    ],
)
def test_the_form_is_the_standard_s(stream, events):
    assert EventParser().feed(stream.encode()) == events


def test_a_line_break_of_two_bytes_may_be_cut():
    parser = EventParser()
    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"\ndata: b\r") == []
    assert parser.feed(b"\n\r") == ["a\nb"]
    assert parser.feed(b"\n") == []


@pytest.mark.parametrize("part", [b"data: 0123456789", b"data: 0123456789\n", b"data: 012345\ndata: 678901\n"])
def test_an_event_without_end_is_refused(part):
    with pytest.raises(FailedRequest, match="more than 10 bytes"):
        parser = EventParser(max_event_bytes=10)
        for _ in range(3):
            parser.feed(part)


def test_many_events_of_allowed_size_are_not():
    parser = EventParser(max_event_bytes=10)
    assert [event for _ in range(50) for event in parser.feed(b"data: 01234\n\n")] == ["01234"] * 50
