"""Server-sent events: the bytes of a stream, cut anywhere, become the data of its events."""

import re

MAX_EVENT_BYTES = 16 * 2**20
"""No event of a language model comes near to it; a server that sends one without end must not fill this client's memory."""
END_OF_LINE = re.compile(rb"\r\n|\n|\r")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """An event has more bytes than are allowed."""


class EventParser:
    """Takes bytes as they arrive and gives the data of every event that they complete.

    Follows the WHATWG's definition: lines end with LF, CR LF or CR; a line that begins with a colon is a comment, which servers
    send to keep a connection alive; several data lines make one text; an event without data, and one that the end of the stream
    cuts off, is none. Fields other than `data` are ignored.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES):
        self._max_event_bytes = max_event_bytes
        self._line = b""
        """The beginning of a line whose end has not come."""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._ended_with_cr = False
        self._is_first_line = True

    def feed(self, received: bytes) -> list[str]:
        """Data of the events that end within these bytes. Raises EventTooLarge."""
        if self._ended_with_cr and received:  # that CR has ended its line already; an LF behind it belongs to it
            received = received.removeprefix(b"\n")
            self._ended_with_cr = False
        self._ended_with_cr = self._ended_with_cr or received.endswith(b"\r")
        *lines, self._line = END_OF_LINE.split(self._line + received)
        events = []
        for line in lines:
            if (event := self._take(line)) is not None:
                events.append(event)
        self._check_size(len(self._line))
        return events

    def _take(self, line: bytes) -> str | None:
        """The data of the event that this line ends, if it is empty; otherwise it is one of the event's lines."""
        if self._is_first_line:
            line, self._is_first_line = line.removeprefix(BYTE_ORDER_MARK), False
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._check_size(len(value))
                self._data.append(value.removeprefix(b" "))
                self._data_bytes += len(value)
            return None
        data, self._data, self._data_bytes = self._data, [], 0
        return b"\n".join(data).decode(errors="replace") if data else None

    def _check_size(self, more: int) -> None:
        if self._data_bytes + more > self._max_event_bytes:
            raise EventTooLarge(f"an event has more than {self._max_event_bytes} bytes")
