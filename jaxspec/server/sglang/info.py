"""Endpoints for probes, routers, benchmarks and the owner: health, description, load, and control of the server.

Shapes are SGLang's.
"""

import asyncio
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BeforeValidator

from jaxspec.engine.stats import EngineStats
from jaxspec.server.bodies import JsonBody, documented
from jaxspec.server.errors import ApiError
from jaxspec.server.fields import NameOrNames, RequestModel
from jaxspec.server.health import HealthProbe
from jaxspec.server.metrics import StepTimes
from jaxspec.server.middleware import admin_only
from jaxspec.server.model import ServedModel
from jaxspec.server.neutral_fields import each, neutral
from jaxspec.server.running import RunningRequests
from jaxspec.server.sending import ResponseModel, failures, json_response, success
from jaxspec.server.settings import ServerSettings
from jaxspec.version import own_version

MAX_TIMEOUT = 3600.0


class HealthResponse(ResponseModel):
    status: str


class VersionResponse(ResponseModel):
    version: str


class ModelInfo(ResponseModel):
    """By SGLang's names."""

    model_path: str
    """The model as it was given at the start: a path or a name."""
    served_model_name: str
    tokenizer_path: str | None
    """The directory of the tokenizer on the server's machine, if there is one."""
    is_generation: bool
    has_image_understanding: bool
    has_audio_understanding: bool
    preferred_sampling_params: str | None
    weight_version: str
    context_length: int


class AdaptiveTreesInfo(ResponseModel):
    """The trees that an adaptive engine uses."""

    current: str
    """levels/children/nodes"""
    best: dict[str, str]
    """The fastest tree by batch size, as far as measured."""
    accept_lengths: dict[str, float]
    """Estimated tokens per verification by tree, bonus included."""
    switches: int


class EngineState(ResponseModel):
    last_gen_throughput: float
    """Tokens per second of work since the cache was flushed."""
    num_running_reqs: int
    num_waiting_reqs: int
    avg_spec_accept_length: float | None = None
    """Tokens per verification since the cache was flushed, bonus included; absent before the first one."""
    adaptive_trees: AdaptiveTreesInfo | None = None
    """Absent unless the server chooses among several trees."""


class CompiledPrograms(ResponseModel):
    """Requests are served at once; smaller programs, which serve them faster, compile in the background."""

    ready: int
    total: int
    seconds_left: int | None = None
    """A forecast, corrected each time it is read; null if nothing compiles, and until the first program is ready."""


class ServerInfo(ResponseModel):
    """With the admin key, the settings that the server was launched with are here too."""

    model_path: str
    tokenizer_path: str | None
    served_model_name: str
    version: str
    status: str
    """ready or unhealthy."""
    tree: str
    """The draft tree: levels/children/nodes. 0/1/1 is plain decoding."""
    speculative_trees: list[str]
    """All trees that requests may ask for."""
    speculative_num_steps: int
    speculative_eagle_topk: int
    speculative_num_draft_tokens: int
    programs: CompiledPrograms
    """How many are compiled (ready), and how many there are with those that compile in the background (total)."""
    context_length: int
    max_total_num_tokens: int
    """Size of the cache in tokens."""
    max_req_input_len: int
    page_size: int
    tp_size: int
    dp_size: int
    internal_states: list[EngineState]
    step_time_dict: dict[str, list[float]]
    """Seconds of the latest cycles without prefill, by the number of requests in them."""


class Load(ResponseModel):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    """Share of the cache that requests hold."""
    gen_throughput: float
    cache_hit_rate: float
    utilization: float


class AggregateLoad(ResponseModel):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_throughput: float
    avg_utilization: float


class LoadsResponse(ResponseModel):
    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: AggregateLoad


@neutral(each("finished_reason abort_message"))
class AbortRequest(RequestModel):
    """POST /abort_request, SGLang's."""

    rid: Annotated[NameOrNames, BeforeValidator(lambda given: None if given == "" else given)] = None
    """Requests to end, by `rid`, `request_id` or the header x-request-id. Unknown names are not an error. "": none."""
    abort_all: bool | None = None
    """All requests are ended."""


class AbortResponse(ResponseModel):
    aborted: int
    """Completions that were ended."""


class ShortLoad(ResponseModel):
    dp_rank: int
    num_reqs: int
    """Waiting ones included."""
    num_waiting_reqs: int
    num_tokens: int
    """Slots of the cache in use."""


def info_routes(
    running: RunningRequests, model: ServedModel, settings: ServerSettings, steps: StepTimes
) -> tuple[APIRouter, APIRouter]:  # fmt: skip
    router, control = APIRouter(tags=["information"]), APIRouter(tags=["control"])
    engine = running.engine
    probe, ok = HealthProbe(engine), HealthResponse(status="ok")
    flushed = engine.stats  # at the last flush: SGLang's benchmark flushes the cache before a run, and reads averages after it

    @router.get("/health", responses=success(HealthResponse))
    @router.get("/ready", responses=success(HealthResponse))
    @router.get("/ping", responses=success(HealthResponse))
    async def health() -> Response:
        """200 while the engine works, 503 while it does not and while the server shuts down."""
        running.check_available()
        return json_response(ok)

    @router.get("/health_generate", responses=success(HealthResponse))
    async def health_generate() -> Response:
        """The same, but only after the engine has made a token."""
        running.check_available()
        await probe.check()
        return json_response(ok)

    @router.get("/version", responses=success(VersionResponse))
    async def version() -> Response:
        """The version of jaxspec."""
        return json_response(VersionResponse(version=own_version()))

    @router.get("/model_info", responses=success(ModelInfo))
    @router.get("/get_model_info", responses=success(ModelInfo))
    async def model_info() -> Response:
        """The served model."""
        info = ModelInfo(
            model_path=model.path or model.name,
            served_model_name=model.name,
            tokenizer_path=model.tokenizer_path,
            is_generation=True,
            has_image_understanding=False,
            has_audio_understanding=False,
            preferred_sampling_params=None,
            weight_version="default",
            context_length=model.context_length,
        )
        return json_response(info)

    @router.get("/server_info", responses=success(ServerInfo))
    @router.get("/get_server_info", responses=success(ServerInfo))
    async def server_info(request: Request) -> Response:
        """Settings (with the admin key), state, and averages since the cache was flushed."""
        shown = settings.shown if request.state.is_admin else {}
        visible = {name: without_directory(value) for name, value in shown.items()}
        return json_response(describe_server(engine.stats.since(flushed), engine.is_healthy, model, steps, visible))

    @router.get("/get_load", responses=success(list[ShortLoad]))
    async def get_load() -> Response:
        """The same in short, as sglang-router asks for it."""
        stats = engine.stats
        load = ShortLoad(
            dp_rank=0,
            num_reqs=stats.running + stats.waiting,
            num_waiting_reqs=stats.waiting,
            num_tokens=stats.used_tokens,
        )
        return json_response([load])

    @router.get("/v1/loads", responses=success(LoadsResponse))
    @router.get("/loads", responses=success(LoadsResponse))
    async def loads() -> Response:
        """The server's load, for routers."""
        return json_response(describe_load(engine.stats.since(flushed)))

    @control.post("/abort_request", responses=success(AbortResponse) | failures(415), openapi_extra=documented(AbortRequest))
    async def abort_request(body: Annotated[AbortRequest, Depends(JsonBody(AbortRequest))], request: Request) -> Response:
        """Ends requests: their clients get the text so far, with finish_reason "abort". abort_all needs the admin key."""
        if body.abort_all:
            admin_only(request)
            return json_response(AbortResponse(aborted=await running.abort_all()))
        if body.rid is None:
            raise ApiError(400, "give rid or abort_all", param="rid")
        names = [body.rid] if isinstance(body.rid, str) else body.rid
        return json_response(AbortResponse(aborted=await running.abort(names)))

    @control.get("/flush_cache", response_class=PlainTextResponse, dependencies=[Depends(admin_only)])
    @control.post("/flush_cache", response_class=PlainTextResponse, dependencies=[Depends(admin_only)])
    async def flush_cache(_timeout: Annotated[float, Query(alias="timeout", ge=0, le=MAX_TIMEOUT)] = 0) -> Response:
        """Forgets all cached prefixes and restarts the averages. Needs the admin key. SGLang waits up to `timeout` seconds for
        running requests; here they are not affected, so there is nothing to wait for."""
        nonlocal flushed
        await asyncio.wrap_future(engine.call(lambda owned: owned.flush_cache()))
        flushed = engine.stats
        return PlainTextResponse("Cache flushed.\n")

    return router, control


def describe_server(
    stats: EngineStats, is_healthy: bool, model: ServedModel, steps: StepTimes, settings: dict[str, Any]
) -> ServerInfo:
    """The settings, and the server's state, which takes precedence."""
    tree, throughput = model.tree, round(stats.throughput, 2)
    state = EngineState(last_gen_throughput=throughput, num_running_reqs=stats.running, num_waiting_reqs=stats.waiting)
    if tree.num_steps and stats.accept_length is not None:
        state.avg_spec_accept_length = round(stats.accept_length, 4)
    if (adaptive := stats.adaptive) is not None:
        state.adaptive_trees = AdaptiveTreesInfo(
            current=str(adaptive.current),
            best={str(batch): str(tree) for batch, tree in sorted(adaptive.best.items())},
            accept_lengths={str(tree): round(length, 4) for tree, length in adaptive.accept_lengths.items()},
            switches=adaptive.switches,
        )
    known: dict[str, Any] = {
        "model_path": model.path or model.name,
        "tokenizer_path": model.tokenizer_path,
        "served_model_name": model.name,
        "version": own_version(),
        "status": "ready" if is_healthy else "unhealthy",
        "tree": str(tree),
        "speculative_trees": [str(tree) for tree in model.trees or (tree,)],
        "speculative_num_steps": tree.num_steps,
        "speculative_eagle_topk": tree.topk,
        "speculative_num_draft_tokens": tree.num_draft_tokens,
        "programs": model.programs()._asdict(),
        "context_length": model.context_length,
        "max_total_num_tokens": stats.total_tokens,
        "max_req_input_len": model.context_length - 1,
        "page_size": stats.page_size,
        "step_time_dict": steps.by_batch,
        "tp_size": model.devices,
        "dp_size": 1,
        "internal_states": [state],
    }
    return ServerInfo(**{**settings, **known})


def describe_load(stats: EngineStats) -> LoadsResponse:
    """One entry, as there is one engine."""
    requests, usage, throughput = stats.running + stats.waiting, round(stats.cache_usage, 4), round(stats.throughput, 2)
    load = Load(
        dp_rank=0,
        num_running_reqs=stats.running,
        num_waiting_reqs=stats.waiting,
        num_total_reqs=requests,
        num_used_tokens=stats.used_tokens,
        max_total_num_tokens=stats.total_tokens,
        token_usage=usage,
        gen_throughput=throughput,
        cache_hit_rate=round(stats.cache_hit_rate, 4),
        utilization=usage,
    )
    aggregate = AggregateLoad(
        total_running_reqs=stats.running,
        total_waiting_reqs=stats.waiting,
        total_reqs=requests,
        avg_token_usage=usage,
        avg_throughput=throughput,
        avg_utilization=usage,
    )
    time = datetime.now(UTC).isoformat()
    return LoadsResponse(timestamp=time, version=own_version(), dp_rank_count=1, loads=[load], aggregate=aggregate)


def without_directory(value: Any) -> Any:
    """A setting as clients may see it, without the paths of the server's files."""
    is_path = isinstance(value, str) and value.startswith(("/", "./", "../", "~"))
    return PurePath(value).name if is_path else value
