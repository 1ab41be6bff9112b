"""Before the load: is there a server, which model has it, and what does it tell about tokens? What is wrong is said at once."""

from ..options import BenchmarkError
from .answers import Answer, FailedRequest, Failure, Request
from .backends import UsageFields
from .client import Client

PROBE_TOKENS = 16
REFUSED = (400, 422)
"""What servers answer to fields that they don't know."""


async def first_model(client: Client, url: str) -> str:
    """The first model that the server lists. Raises BenchmarkError."""
    try:
        listed = await client.get_json("/v1/models")
        return str(listed["data"][0]["id"])
    except FailedRequest as error:
        raise BenchmarkError(sentence(f"{url}/v1/models", error.failure)) from None
    except (KeyError, IndexError, TypeError):
        raise BenchmarkError(f"{url}/v1/models lists no model: give --model, or check --base-url") from None


async def probe(client: Client, request: Request, url: str) -> Answer:
    """Sends one short request, and leaves out those fields of `stream_options` that the server refuses.

    Raises:
        BenchmarkError: there is no answer; the message says why and what to do.
    """
    request = request._replace(output_len=min(request.output_len, PROBE_TOKENS))
    kinds = list(UsageFields)
    while True:
        answer = await client.complete(request)
        if answer.failure is None:
            return answer
        is_about_usage = answer.failure.status in REFUSED and client.generation.stream and client.backend.has_stream_options
        if not is_about_usage or client.usage is kinds[-1]:
            raise BenchmarkError(sentence(url, answer.failure))
        client.usage = kinds[kinds.index(client.usage) + 1]


def sentence(url: str, failure: Failure) -> str:
    """One line for the user.

    Out: "http://127.0.0.1:30000: connection refused: start the server, or check --base-url"
    """
    return f"{url}: {failure.reason}" + (f": {failure.hint}" if failure.hint else "")
