"""An HTTP client for OpenAI's completions and chats and SGLang's /generate: streams an answer, takes times, explains failures."""

import json
import math
import re
import ssl
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from jaxspec.commands.common import Chat, Turns

from .options import BenchmarkError

if TYPE_CHECKING:
    from jaxspec.text.prompts import Prompt  # loads transformers

try:
    import aiohttp
except ImportError:
    raise BenchmarkError("the HTTP client needs aiohttp: pip install 'jaxspec-llm[bench]'") from None

BACKENDS = {"openai": "/v1/completions", "sglang": "/generate"}
CHATS = "/v1/chat/completions"
USAGE: tuple[dict, ...] = (
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
"""Ways to ask an OpenAI server to count tokens: in every chunk, at the end, not at all. The first that it accepts is used."""
CONNECT_SECONDS, PAGE_SECONDS = 30.0, 10.0
IDLE_CONNECTION_SECONDS = 2.0
"""Less than servers wait (uvicorn: 5), so that no request is sent into a connection that the server is closing."""
MAX_EVENT_BYTES = 16 * 2**20
HINTS = {
    401: "give the server's key in JAXSPEC_API_KEY",
    403: "give the server's key in JAXSPEC_API_KEY",
    404: "check --base-url, --backend and --model",
    429: "the server rejects requests: lower --max-concurrency",
    503: "the server is not ready or overloaded",
}
CUT_OFF = ("abort", "error", "timeout")
"""Finish reasons of requests that the server gave up."""
SHAPE_ERRORS = (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError)
"""Raised when JSON has another shape than expected."""


class Request(NamedTuple):
    """What to answer, and the number of tokens to generate."""

    prompt: str | list[int] | Chat
    max_tokens: int
    questions: tuple[str, ...] = ()
    """They follow in the same conversation, each after the answer to the one before."""

    @classmethod
    def of(cls, prompt: "Prompt | Chat | Turns", max_tokens: int) -> Self:
        """Of one of `load_prompts`."""
        if isinstance(prompt, Turns):
            first, *others = prompt.questions
            return cls(Chat([{"role": "user", "content": first}]), max_tokens, tuple(others))
        return cls(prompt if isinstance(prompt, str | Chat) else list(prompt), max_tokens)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, Chat)

    def next_turn(self, answer: str) -> Self:
        """The next question, after the answer to this one."""
        assert isinstance(self.prompt, Chat)
        return self._replace(prompt=self.prompt.then(answer, self.questions[0]), questions=self.questions[1:])


class FailedRequest(Exception):
    """A request without a complete answer. The reason contains no address, because it is recorded."""

    def __init__(self, reason: str, hint: str = "", status: int | None = None):
        super().__init__(f"{reason}: {hint}" if hint else reason)
        self.reason, self.status = reason, status


class Chunk(NamedTuple):
    """An event with text or tokens. With speculation a chunk holds all tokens of a cycle."""

    time: float
    tokens: int | None
    """Tokens in this chunk; None if the server does not say."""


@dataclass
class Answer:
    """The answer to one request. Times are seconds of time.perf_counter; None is unknown."""

    sent: float
    ended: float = math.nan
    chunks: list[Chunk] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int | None = None
    tokens: int | None = None
    """Tokens of the completion."""
    accept_length: float | None = None
    """Mean tokens per verification, as reported for this request."""
    failure: FailedRequest | None = None

    @property
    def first_token_seconds(self) -> float:
        """Time to first token."""
        return self.chunks[0].time - self.sent

    @property
    def seconds(self) -> float:
        """From sending the request to its last token."""
        return self.chunks[-1].time - self.sent

    @property
    def seconds_per_token(self) -> float | None:
        """Time per output token after the first; None if there is no second one or the number of tokens is unknown."""
        return None if (self.tokens or 0) < 2 else (self.seconds - self.first_token_seconds) / ((self.tokens or 0) - 1)

    @property
    def chunk_gaps(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [after.time - before.time for before, after in pairwise(self.chunks)]

    @property
    def token_gaps(self) -> list[float] | None:
        """Inter-token latencies: the tokens of a chunk share the gap before it. None if a chunk's number of tokens is unknown."""
        gaps: list[float] = []
        for gap, chunk in zip(self.chunk_gaps, self.chunks[1:], strict=True):
            if not chunk.tokens:
                return None
            gaps += [gap / chunk.tokens] * chunk.tokens
        return gaps


class EventParser:
    """Server-sent events: takes bytes as they arrive and returns the data of every completed event.

    Follows the WHATWG definition: lines end with LF, CR LF or CR; a line that begins with a colon is a comment; several data lines
    are joined; an event without data, or cut off by the end of the stream, is dropped. Fields other than `data` are ignored.
    """

    END_OF_LINE = re.compile(rb"\r\n|\n|\r")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES):
        self._max_event_bytes = max_event_bytes
        self._line, self._data = b"", list[bytes]()
        self._ended_with_cr, self._is_first_line = False, True

    def feed(self, received: bytes) -> list[str]:
        """Data of the events that end within these bytes. Raises FailedRequest if an event is too large."""
        if self._ended_with_cr and received:  # that CR has already ended its line; an LF after it belongs to it
            received = received.removeprefix(b"\n")
            self._ended_with_cr = False
        self._ended_with_cr = self._ended_with_cr or received.endswith(b"\r")
        *lines, self._line = self.END_OF_LINE.split(self._line + received)
        events = [event for line in lines if (event := self._take(line)) is not None]
        self._check_size(self._line)
        return events

    def _take(self, line: bytes) -> str | None:
        """The data of the event that an empty line ends; None for any other line."""
        if self._is_first_line:
            line, self._is_first_line = line.removeprefix(b"\xef\xbb\xbf"), False
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data).decode(errors="replace") if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._check_size(value)
            self._data.append(value.removeprefix(b" "))
        return None

    def _check_size(self, more: bytes) -> None:
        if sum(map(len, self._data)) + len(more) > self._max_event_bytes:
            raise FailedRequest(f"an event has more than {self._max_event_bytes} bytes")


class Client:
    """A connection to one server. Use it as an async context manager."""

    def __init__(
        self, base_url: str, backend: str, model: str = "", *, api_key: str | None = None, timeout: float = 600.0, **sampling: Any
    ):
        """`timeout`: seconds per request. `sampling`: more fields of every request, such as temperature and ignore_eos."""
        self.base_url, self.backend, self.model = base_url, backend, model
        self.usage = 0
        """Index into USAGE."""
        self._key, self._seconds, self._sampling = api_key, timeout, sampling

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._seconds, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def complete(self, request: Request) -> Answer:
        """The answer to a request. A failure is stored in it, not raised."""
        answer, url = Answer(perf_counter()), self.base_url + (CHATS if request.is_chat else BACKENDS[self.backend])
        try:
            async with self._session.post(url, json=self._body(request), allow_redirects=False) as response:
                await self._check(response, "text/event-stream")
                await self._read_stream(response, answer)
        except FailedRequest as error:
            answer.failure = error
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            answer.failure = explain(error, self._seconds)
        answer.ended = perf_counter()
        return answer

    async def get(self, path: str) -> str:
        """The text of a page. Raises FailedRequest."""
        try:
            timeout = aiohttp.ClientTimeout(total=PAGE_SECONDS)
            async with self._session.get(self.base_url + path, timeout=timeout, allow_redirects=False) as response:
                await self._check(response, None)
                return await response.text(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            raise explain(error, PAGE_SECONDS) from None

    async def get_json(self, path: str) -> Any:
        """The JSON of a page. Raises FailedRequest."""
        text = await self.get(path)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise FailedRequest(f"{path} is not JSON but begins with {one_line(text, 60)!r}", HINTS[404]) from None

    def _body(self, request: Request) -> dict[str, Any]:
        if self.backend == "sglang":
            name = "text" if isinstance(request.prompt, str) else "input_ids"
            params = {"max_new_tokens": request.max_tokens, **self._sampling}
            return {name: request.prompt, "sampling_params": params, "stream": True}
        what = {"messages": request.prompt.messages} if isinstance(request.prompt, Chat) else {"prompt": request.prompt}
        body = {"model": self.model, **what, "max_tokens": request.max_tokens, "stream": True}
        return body | self._sampling | USAGE[self.usage]

    async def _check(self, response: aiohttp.ClientResponse, expected: str | None) -> None:
        """Raises FailedRequest unless the status is 200 and the type of content is the expected one (None: any)."""
        if response.status != 200:
            message = error_message(await response.text(errors="replace"))
            message = message.replace(self._key, "(secret)") if self._key else message  # some servers repeat the key
            raise FailedRequest(f"status {response.status}: {message}", HINTS.get(response.status, ""), response.status)
        if expected and response.content_type != expected:
            raise FailedRequest(f"the answer is {response.content_type}, expected {expected}", HINTS[404])

    async def _read_stream(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        parser, is_done = EventParser(), False
        async for received in response.content.iter_any():
            now = perf_counter()
            for event in parser.feed(received):
                if event == "[DONE]":
                    is_done = True
                elif not is_done:
                    self._take(answer, event, now)
        if not is_done:
            raise FailedRequest("the stream ended before [DONE]")
        if not answer.chunks:
            raise FailedRequest("the answer is empty", "check the prompt, or give --ignore-eos")

    def _take(self, answer: Answer, text: str, now: float) -> None:
        """Adds an event to the answer. Raises FailedRequest if it is malformed or reports an error."""
        try:
            event = json.loads(text)
            if event.get("error") is not None:
                raise FailedRequest(f"the server reported an error: {error_message(text)}")
            (take_generate if self.backend == "sglang" else take_completion)(answer, event, now)
        except SHAPE_ERRORS as error:
            problem = "not JSON" if isinstance(error, json.JSONDecodeError) else f"{type(error).__name__}: {error}"
            raise FailedRequest(f"malformed event ({problem}): {one_line(text, 80)!r}") from None


def take_completion(answer: Answer, event: dict, now: float) -> None:
    """Adds an event of /v1/completions or of a chat."""
    choices, usage = event["choices"], event.get("usage") or {}
    for choice in choices:
        check_finish(choice.get("finish_reason"))
    details = (event.get("metrics") or {}).get("speculative_decoding") or {}
    answer.accept_length = details.get("mean_acceptance_length", answer.accept_length)
    texts = [choice["delta"].get("content") if "delta" in choice else choice["text"] for choice in choices]
    add(answer, "".join(text or "" for text in texts), usage, now, is_chunk=bool(choices))


def take_generate(answer: Answer, event: dict, now: float) -> None:
    """Adds an event of /generate, which repeats all text so far."""
    meta = event["meta_info"]
    check_finish((meta.get("finish_reason") or {}).get("type"))
    answer.accept_length = meta.get("spec_accept_length", answer.accept_length)
    add(answer, event["text"][len(answer.text) :], meta, now, is_chunk=True)


def add(answer: Answer, new_text: str, usage: dict, now: float, *, is_chunk: bool) -> None:
    """Adds new text and counts. Raises FailedRequest if the number of tokens falls, TypeError if it is not a number."""
    tokens = usage.get("completion_tokens")
    if tokens is not None and (type(tokens) is not int or tokens < (answer.tokens or 0)):
        raise TypeError(f"completion_tokens is {str(tokens)[:40]!r} after {answer.tokens}")
    # A first count that comes after other chunks does not belong to this chunk alone.
    is_first = answer.tokens is None and not answer.chunks
    new_tokens = None if tokens is None or (answer.tokens is None and not is_first) else tokens - (answer.tokens or 0)
    if (new_tokens and is_chunk) or (new_text and new_tokens is None):
        answer.chunks.append(Chunk(now, new_tokens))
    answer.text += new_text
    answer.tokens = answer.tokens if tokens is None else tokens
    answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)


def check_finish(reason: str | None) -> None:
    if reason in CUT_OFF:
        raise FailedRequest(f"the server gave up the request: finish_reason is {reason}")


def explain(error: Exception, seconds: float) -> FailedRequest:
    """An error of the connection as a reason and a hint."""
    check = "check --base-url"
    match error:
        case aiohttp.ClientConnectorSSLError() | aiohttp.ClientConnectorCertificateError() | ssl.SSLError():
            return FailedRequest("no TLS connection", "the server may speak plain HTTP, or its certificate is not trusted")
        case aiohttp.ClientConnectorDNSError():
            return FailedRequest("unknown host", check)
        case aiohttp.ClientConnectorError() if isinstance(error.os_error, ConnectionRefusedError):
            return FailedRequest("connection refused", f"start the server, or {check}")
        case aiohttp.ClientConnectorError():
            return FailedRequest(f"no connection: {error.os_error.strerror or 'unknown reason'}", check)
        case TimeoutError():
            return FailedRequest(f"no complete answer within {seconds:g} s", "increase --request-timeout")
        case aiohttp.ClientPayloadError():
            return FailedRequest("the connection was cut during the answer")
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientResponseError() | ConnectionResetError():
            return FailedRequest("the server closed the connection without an answer", f"{check}; it may need https://")
    return FailedRequest(type(error).__name__, check)


def error_message(text: str) -> str:
    """The message in an error body (OpenAI's or FastAPI's form), or how the body begins."""
    try:
        body = json.loads(text)
        error = body.get("error", body.get("detail", body.get("message")))
        message = error.get("message") if isinstance(error, dict) else error
    except SHAPE_ERRORS:
        message = None
    return one_line(str(message), 200) if message else f"a body that begins with {one_line(text, 60)!r}"


def one_line(text: str, limit: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "..."
