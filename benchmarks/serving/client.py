"""The HTTP client: sends one request, reads its answer as it arrives, and says what went wrong in words."""

import json
import ssl
from collections.abc import Mapping
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from ..options import BenchmarkError
from .answers import Answer, Chunk, FailedRequest, Failure, Request
from .backends import Backend, Generation, Piece, UsageFields
from .events import EventParser, EventTooLarge

try:
    import aiohttp
except ImportError:
    raise BenchmarkError("the HTTP client needs aiohttp: pip install 'jaxspec-llm[bench]'") from None

CONNECT_SECONDS = 30.0
IDLE_CONNECTION_SECONDS = 2.0
"""Less than servers wait (uvicorn: 5), so that no request is sent into a connection that the server is closing."""
OPTIONAL_SECONDS = 10.0
"""How long a question to the server may take on which no figure of a request depends."""
MAX_MESSAGE = 200
"""Characters of a server's message that are shown."""
HINTS = {
    401: "give the server's key with --api-key or in JAXSPEC_API_KEY",
    403: "give a key that may do this with --api-key or in JAXSPEC_API_KEY",
    404: "check --base-url, --backend, --endpoint and --model",
    405: "check --base-url, --backend and --endpoint",
    429: "the server turns requests away: lower --max-concurrency",
    503: "the server is not ready, or has too much to do",
}
CUT_OFF = ("abort", "error", "timeout")
"""Reasons to finish that are no end of a completion."""
SHAPE_ERRORS = (json.JSONDecodeError, RecursionError, KeyError, TypeError, AttributeError, IndexError)
"""What looking into JSON of another shape raises."""


class Client:
    """Talks to one server. Use it as an async context manager."""

    def __init__(
        self,
        base_url: str,
        backend: Backend,
        generation: Generation,
        usage: UsageFields = UsageFields.PER_CHUNK,
        *,
        endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        verify: bool = True,
    ):
        """`headers` may hold keys: whatever is shown or recorded does not have their values. `timeout`: seconds per request."""
        self.base_url, self.backend, self.generation, self.usage = base_url, backend, generation, usage
        self._url = base_url + (endpoint or backend.path)
        self._headers, self._verify = dict(headers or {}), verify
        self._seconds = timeout

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._seconds, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS, ssl=self._verify)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def complete(self, request: Request) -> Answer:
        """The answer to a request. What fails is in it, not raised."""
        body = json.dumps(self.backend.body(request, self.generation, self.usage)).encode()
        headers = {"Content-Type": "application/json"}
        answer = Answer(perf_counter(), is_stream=self.generation.stream)
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
                await self._check(response)
                await (self._read_stream(response, answer) if answer.is_stream else self._read_whole(response, answer))
            check_complete(answer)
        except FailedRequest as error:
            answer.failure = error.failure._replace(reason=self._without_secrets(str(error)))
        except EventTooLarge as error:
            answer.failure = Failure(f"malformed stream: {error}")
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            answer.failure = self._explain(error, self._seconds)
        answer.ended = perf_counter()
        return answer

    async def get(self, path: str) -> str:
        """The text of a page. Raises FailedRequest."""
        try:
            timeout = aiohttp.ClientTimeout(total=OPTIONAL_SECONDS)
            async with self._session.get(self.base_url + path, timeout=timeout, allow_redirects=False) as response:
                await self._check(response, content=None)
                return await response.text(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            raise FailedRequest(*self._explain(error, OPTIONAL_SECONDS)) from None

    async def get_json(self, path: str) -> Any:
        """The JSON of a page. Raises FailedRequest."""
        text = await self.get(path)
        try:
            return json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            raise FailedRequest(f"{path} is not JSON but begins with {shown(text, 60)!r}", HINTS[404]) from None

    async def _check(self, response: aiohttp.ClientResponse, content: str | None = "") -> None:
        """Raises FailedRequest unless the answer has status 200 and the right type of content (None: any)."""
        kind = response.content_type
        if response.status != 200:
            message = error_message(await response.text(errors="replace"), kind)
            raise FailedRequest(f"status {response.status}: {message}", HINTS.get(response.status, ""), response.status)
        expected = "text/event-stream" if self.generation.stream else "application/json"
        if content is not None and kind != expected:
            raise FailedRequest(f"the answer is {kind}, expected {expected}", HINTS[404])

    async def _read_whole(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        text = await response.text(errors="replace")
        now = perf_counter()
        take(answer, read_piece(self.backend, text), now, is_cumulative=True)

    async def _read_stream(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        parser, is_done = EventParser(), False
        async for received in response.content.iter_any():
            now = perf_counter()
            for event in parser.feed(received):
                if event == "[DONE]":
                    is_done = True
                elif not is_done:
                    take(answer, read_piece(self.backend, event), now, is_cumulative=self.backend.is_cumulative)
        if not is_done:
            raise FailedRequest("the stream ended before [DONE]")

    def _explain(self, error: Exception, seconds: float) -> Failure:
        """What an error of the connection means. No address is in it, since it is recorded."""
        match error:
            case aiohttp.ClientConnectorCertificateError():
                return Failure("the server's certificate is not trusted", "check --base-url, or give --insecure")
            case aiohttp.ClientConnectorSSLError() | ssl.SSLError():
                return Failure("no TLS connection", "the server may speak plain HTTP: try http:// in --base-url")
            case aiohttp.ClientConnectorDNSError():
                return Failure("the host's name has no address", "check --base-url")
            case aiohttp.ClientConnectorError() if isinstance(error.os_error, ConnectionRefusedError):
                return Failure("connection refused", "start the server, or check --base-url")
            case aiohttp.ClientConnectorError():
                return Failure(f"no connection: {error.os_error.strerror or 'unknown reason'}", "check --base-url")
            case aiohttp.ConnectionTimeoutError():
                return Failure(f"no connection within {min(seconds, CONNECT_SECONDS):g} s", "check --base-url")
            case TimeoutError():
                return Failure(f"no complete answer within {seconds:g} s", "give more time with --request-timeout")
            case aiohttp.ClientPayloadError():
                return Failure("the connection was cut in the middle of the answer")
            case aiohttp.ServerDisconnectedError() | aiohttp.ClientResponseError() | ConnectionResetError():
                return Failure("the server hung up instead of an answer", "check --base-url; it may need https://")
            case aiohttp.InvalidURL() | aiohttp.InvalidUrlClientError():
                return Failure("the address is no URL", "check --base-url")
        return Failure(f"{type(error).__name__}", "check --base-url")

    def _without_secrets(self, text: str) -> str:
        """Some servers repeat the key in their message."""
        for value in self._headers.values():
            for secret in {value, value.removeprefix("Bearer ")} - {""}:
                text = text.replace(secret, "(secret)")
        return text


def read_piece(backend: Backend, text: str) -> Piece:
    """What an event says. Raises FailedRequest if it is malformed, or tells of an error."""
    try:
        event = json.loads(text)
        if event.get("error") is not None:
            raise FailedRequest(f"the server reported an error in its answer: {error_message(text, 'application/json')}")
        return backend.piece(event)
    except SHAPE_ERRORS as error:
        problem = "not JSON" if isinstance(error, json.JSONDecodeError) else f"of another shape ({type(error).__name__}: {error})"
        raise FailedRequest(f"malformed event, {problem}: {shown(text, 80)!r}") from None


def take(answer: Answer, piece: Piece, now: float, *, is_cumulative: bool) -> None:
    """Adds what a piece says to an answer; what it does not say stays as it is. Raises FailedRequest if the counts fall."""
    is_counted = answer.tokens is not None or not answer.chunks  # else a count at the end is not about this chunk alone
    brought = piece.tokens - (answer.tokens or 0) if piece.tokens is not None and is_counted else None
    if brought is not None and brought < 0:
        raise FailedRequest(f"malformed event: completion_tokens went from {answer.tokens} to {piece.tokens}")
    text = piece.text if is_cumulative else answer.text + piece.text
    # Text whose tokens are counted already is no chunk of its own: chat's first event has a role, the second its text.
    if (brought and piece.has_choice) or (text != answer.text and (brought is None or not answer.chunks)):
        answer.chunks.append(Chunk(now, brought))
    answer.text = text
    answer.tokens = answer.tokens if piece.tokens is None else piece.tokens
    answer.finish_reason = piece.finish_reason or answer.finish_reason
    answer.prompt_tokens = answer.prompt_tokens if piece.prompt_tokens is None else piece.prompt_tokens
    if piece.accept_length is not None:
        answer.accept_length, answer.accept_length_source = piece.accept_length, piece.accept_length_source


def check_complete(answer: Answer) -> None:
    """Raises FailedRequest for an answer that ended without an error, but not because the model was done."""
    if answer.finish_reason in CUT_OFF:
        raise FailedRequest(f"the server ended the request: finish_reason is {answer.finish_reason}")
    if not answer.tokens and (answer.tokens == 0 or not answer.text):
        raise FailedRequest("no tokens: the answer is empty", "check the prompt, or give --ignore-eos")


def error_message(text: str, content_type: str) -> str:
    """What a body with an error says: the message of OpenAI's form or FastAPI's detail, else how it begins."""
    try:
        body = json.loads(text)
        error = body.get("error", body.get("detail", body.get("message")))
        message = error.get("message") if isinstance(error, dict) else error
    except SHAPE_ERRORS:
        message = None
    if message:
        return shown(str(message), MAX_MESSAGE)
    return f"an answer of type {content_type} which begins with {shown(text, 60)!r}" if text else "without a message"


def shown(text: str, most: int) -> str:
    """Text of a server on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[:most] + "..."
