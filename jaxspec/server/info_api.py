"""What probes, routers and benchmarks ask: whether the server works, what it serves, and how busy it is. Shapes are SGLang's."""

from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from jaxspec.server.answers import (
    HealthAnswer,
    LoadsAnswer,
    ModelInfo,
    ServerInfo,
    VersionAnswer,
    answers,
)
from jaxspec.server.health import HealthProbe
from jaxspec.server.model import ServedModel
from jaxspec.server.running import RunningRequests
from jaxspec.server.settings import ServerSettings
from jaxspec.server.totals import Totals
from jaxspec.version import own_version

OK = {"status": "ok"}


def info_routes(running: RunningRequests, model: ServedModel, settings: ServerSettings, totals: Totals) -> APIRouter:
    """The endpoints over one engine and its model."""
    router = APIRouter(tags=["information"])
    probe, information = HealthProbe(running.engine), Information(running, model, settings, totals)

    @router.get("/health", responses=answers(HealthAnswer))
    @router.get("/ready", responses=answers(HealthAnswer))
    @router.get("/ping", responses=answers(HealthAnswer))
    async def health() -> Response:
        """200 while the engine works, 503 while it does not and while the server shuts down."""
        running.check_available()
        return JSONResponse(OK)

    @router.get("/health_generate", responses=answers(HealthAnswer))
    async def health_generate() -> Response:
        """The same, but only after the engine has made a token."""
        running.check_available()
        await probe.check()
        return JSONResponse(OK)

    @router.get("/version", responses=answers(VersionAnswer))
    async def version() -> Response:
        """Of jaxspec."""
        return JSONResponse({"version": own_version()})

    @router.get("/model_info", responses=answers(ModelInfo))
    @router.get("/get_model_info", responses=answers(ModelInfo))
    async def model_info() -> Response:
        """The served model."""
        return JSONResponse(information.of_model())

    @router.get("/server_info", responses=answers(ServerInfo))
    @router.get("/get_server_info", responses=answers(ServerInfo))
    async def server_info(request: Request) -> Response:
        """How the server is set up, and what it has done since the cache was flushed. Its settings need the admin key."""
        return JSONResponse(information.of_server(with_settings=request.state.is_admin))

    @router.get("/v1/loads", responses=answers(LoadsAnswer))
    @router.get("/loads", responses=answers(LoadsAnswer))
    async def loads() -> Response:
        """How busy the server is, for routers."""
        return JSONResponse(information.of_load())

    return router


class Information:
    """What the endpoints show."""

    def __init__(self, running: RunningRequests, model: ServedModel, settings: ServerSettings, totals: Totals):
        self._engine, self._model, self._settings, self._totals = running.engine, model, settings, totals

    def of_model(self) -> dict[str, Any]:
        """By SGLang's names; where they mean a path, it is the model's name."""
        name = self._model.name
        return {
            "model_path": name,
            "served_model_name": name,
            "tokenizer_path": None if self._model.tokenizer is None else name,
            "is_generation": True,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "context_length": self._model.context_length,
        }

    def of_server(self, with_settings: bool) -> dict[str, Any]:
        """Settings by SGLang's names, and our own additions."""
        stats, spec = self._engine.stats, self._model.spec
        settings = {name: without_directory(value) for name, value in self._settings.shown.items()} if with_settings else {}
        state = {
            "last_gen_throughput": round(self._totals.throughput, 2),
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
        }
        if spec.num_steps and (accept_length := self._totals.accept_length) is not None:
            state["avg_spec_accept_length"] = round(accept_length, 4)
        return {
            **settings,
            "model_path": self._model.name,
            "tokenizer_path": None if self._model.tokenizer is None else self._model.name,
            "served_model_name": self._model.name,
            "version": own_version(),
            "status": "ready" if self._engine.is_healthy else "unhealthy",
            "tree": str(spec),
            "speculative_trees": [str(tree) for tree in self._model.trees or (spec,)],
            "speculative_num_steps": spec.num_steps,
            "speculative_eagle_topk": spec.topk,
            "speculative_num_draft_tokens": spec.num_draft_tokens,
            "context_length": self._model.context_length,
            "max_total_num_tokens": stats.total_pages * stats.page_size,
            "max_req_input_len": self._model.context_length - 1,
            "page_size": stats.page_size,
            "tp_size": 1,
            "dp_size": 1,
            "internal_states": [state],
        }

    def of_load(self) -> dict[str, Any]:
        """One entry, as there is one engine."""
        stats = self._engine.stats
        usage = round(stats.used_pages / max(1, stats.total_pages), 4)
        throughput = round(self._totals.throughput, 2)
        load = {
            "dp_rank": 0,
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "num_total_reqs": stats.running + stats.waiting,
            "num_used_tokens": stats.used_pages * stats.page_size,
            "max_total_num_tokens": stats.total_pages * stats.page_size,
            "token_usage": usage,
            "gen_throughput": throughput,
            "cache_hit_rate": round(self._totals.cache_hit_rate, 4),
            "utilization": usage,
        }
        aggregate = {
            "total_running_reqs": stats.running,
            "total_waiting_reqs": stats.waiting,
            "total_reqs": stats.running + stats.waiting,
            "avg_token_usage": usage,
            "avg_throughput": throughput,
            "avg_utilization": usage,
        }
        time = datetime.now(UTC).isoformat()
        return {"timestamp": time, "version": own_version(), "dp_rank_count": 1, "loads": [load], "aggregate": aggregate}


def without_directory(value: Any) -> Any:
    """A setting as clients may see it: where the server keeps its files is not their business."""
    is_path = isinstance(value, str) and value.startswith(("/", "./", "../", "~"))
    return PurePath(value).name if is_path else value
