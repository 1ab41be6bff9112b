"""Bodies are JSON and say so."""

from fastapi import Request

from jaxspec.server.errors import ApiError, echo


async def only_json(request: Request) -> None:
    """Refuses a body that is not declared as JSON; curl -d without a header declares a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind.startswith("application/") and (kind == "application/json" or kind.endswith("+json"))
    if request.method in ("POST", "PUT") and not is_json:
        raise ApiError(415, f"send the header Content-Type: application/json, got {echo(kind) or 'none'}", param="content-type")
