"""What changes the running server: forgetting the cached prefixes, and ending requests."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from jaxspec.server.answers import AbortAnswer, answers, errors
from jaxspec.server.auth import admin_only
from jaxspec.server.content_type import only_json
from jaxspec.server.errors import ApiError
from jaxspec.server.fields import NAME_OR_NAMES, RequestName, RequestNames, Strict, described_as, only
from jaxspec.server.running import RunningRequests
from jaxspec.server.totals import Totals

MAX_TIMEOUT = 3600.0


class AbortRequest(Strict):
    """POST /abort_request, SGLang's."""

    rid: Annotated[RequestName | RequestNames | None, described_as(NAME_OR_NAMES)] = None
    """What to end: names from `rid`, `request_id` or the header x-request-id. Names of nothing are no error."""
    abort_all: bool | None = None
    """Everything is ended."""

    # Not supported yet.
    finished_reason: Annotated[Any, only()] = None
    abort_message: Annotated[Any, only()] = None


def control_routes(running: RunningRequests, totals: Totals) -> APIRouter:
    """The endpoints over one engine."""
    router = APIRouter(tags=["control"])

    @router.post("/abort_request", responses=answers(AbortAnswer) | errors(415), dependencies=[Depends(only_json)])
    async def abort_request(body: AbortRequest, request: Request) -> Response:
        """Ends requests; whoever waits for one gets what there is, with finish_reason "abort". abort_all needs the admin key."""
        if body.abort_all:
            admin_only(request)
            return JSONResponse({"aborted": await running.abort_all()})
        if body.rid is None:
            raise ApiError(400, "give rid or abort_all", param="rid")
        names = [body.rid] if isinstance(body.rid, str) else body.rid
        return JSONResponse({"aborted": await running.abort(names)})

    @router.get("/flush_cache", response_class=PlainTextResponse, dependencies=[Depends(admin_only)])
    @router.post("/flush_cache", response_class=PlainTextResponse, dependencies=[Depends(admin_only)])
    async def flush_cache(_timeout: Annotated[float, Query(alias="timeout", ge=0, le=MAX_TIMEOUT)] = 0) -> Response:
        """Forgets every cached prefix, and where averages begin. Needs the admin key. SGLang waits up to `timeout` seconds until
        nothing runs; here requests that run are not touched, so there is nothing to wait for."""
        await running.engine.flush_cache()
        totals.restart()
        return PlainTextResponse("Cache flushed.\n")

    return router
