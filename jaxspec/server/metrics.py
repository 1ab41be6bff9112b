"""/metrics: what the engine, its requests and the HTTP layer count, in Prometheus' text formats.

A scrape reads the engine's newest EngineStats, which its thread replaces as a whole, so it never waits for the engine nor the
engine for it. What the numbers are called and mean is in metric_definitions.py.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CollectorRegistry, Histogram, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.engine.async_engine import AsyncEngine
from jaxspec.engine.request import GenerationOutput
from jaxspec.engine.stats import EngineStats
from jaxspec.server.metric_definitions import ALIAS_PREFIX, ENGINE_METRICS, PREFIX, REQUEST_METRICS

PATH = "/metrics"
OPENMETRICS = "application/openmetrics-text"
OTHER = "other"
"""The path of requests that reached no route: an unknown one, or refused before (no key, a body too large)."""


class Point(NamedTuple):
    """One line of a metric."""

    value: float
    labels: Mapping[str, str]
    suffix: str = ""
    """Of the name: a histogram has several."""


def family(kind: str, name: str, meaning: str, points: Iterable[Point]) -> Metric:
    """A metric with all its lines."""
    result = Metric(name.removesuffix("_total"), meaning, kind)
    for point in points:
        result.add_sample(name + point.suffix, dict(point.labels), point.value)
    return result


def with_alias(kind: str, name: str, alias: str | None, meaning: str, points: list[Point]) -> Iterator[Metric]:
    """A metric under our name and, if it has one, vLLM's."""
    yield family(kind, PREFIX + name, meaning, points)
    if alias is not None:
        yield family(kind, ALIAS_PREFIX + alias, f"{meaning} The same as {PREFIX}{name}.", points)


class Metrics:
    """Histograms of the requests that ended: an Observer in the engine's thread, a collector for scrapes in any other."""

    def __init__(self, model_name: str):
        self.labels = {"model_name": model_name, "engine": "0"}
        """On everything about the engine, as vLLM has them; there is one engine."""
        self._histograms = [
            (metric, Histogram(PREFIX + metric.name, metric.meaning, registry=None, buckets=metric.buckets))
            for metric in REQUEST_METRICS
        ]

    def after_step(self, stats: EngineStats, idle: bool) -> None:
        """Nothing: scrapes read the stats themselves."""

    def finished(self, output: GenerationOutput) -> None:
        for metric, histogram in self._histograms:
            value = metric.read(output)
            if value is not None:
                histogram.observe(value)

    def collect(self) -> Iterator[Metric]:
        for metric, histogram in self._histograms:
            [observed] = histogram.collect()
            points = [
                Point(sample.value, self.labels | sample.labels, suffix)
                for sample in observed.samples
                if (suffix := sample.name.removeprefix(observed.name)) != "_created"  # as old as the process; costs a series each
            ]
            yield from with_alias("histogram", metric.name, metric.alias, metric.meaning, points)


class EngineCollector:
    """The engine's own counts, as they are when somebody asks."""

    def __init__(self, engine: AsyncEngine, labels: Mapping[str, str]):
        self._engine, self._labels = engine, dict(labels)

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats  # once, so that all numbers are of the same moment
        for metric in ENGINE_METRICS:
            value, points = metric.read(stats), []
            if isinstance(value, Mapping):
                assert metric.label is not None
                points = [Point(number, self._labels | {metric.label: key}) for key, number in value.items()]
            else:
                points = [Point(value, self._labels)]
            kind = "counter" if metric.name.endswith("_total") else "gauge"
            yield from with_alias(kind, metric.name, metric.alias, metric.meaning, points)
        healthy = [Point(self._engine.is_healthy, self._labels)]
        yield family("gauge", f"{PREFIX}engine_healthy", "1 while the engine works, 0 once it has failed or ended.", healthy)
        config = self._labels | {"block_size": str(stats.page_size), "num_gpu_blocks": str(stats.total_pages)}
        meaning = f"{PREFIX}cache_page_size_tokens and {PREFIX}cache_total_pages as labels."
        yield family("gauge", f"{ALIAS_PREFIX}cache_config_info", meaning, [Point(1, config)])


class HttpCounts:
    """HTTP requests, counted and read in the event loop's thread."""

    def __init__(self, model_name: str):
        self._labels = {"model_name": model_name}
        self.answered: Counter[tuple[str, str]] = Counter()
        """By path and class of the status."""
        self.rejected = self.active = 0

    def collect(self) -> Iterator[Metric]:
        answered = [
            Point(count, self._labels | {"path": path, "status": status}) for (path, status), count in self.answered.items()
        ]
        yield family("counter", f"{PREFIX}http_requests_total", "HTTP requests, by path and class of the status.", answered)
        meaning = "POST requests that were answered with 503: the queue was full, or the server takes no more."
        yield family("counter", f"{PREFIX}http_rejected_requests_total", meaning, [Point(self.rejected, self._labels)])
        meaning = "HTTP requests that are being answered, streams included."
        yield family("gauge", f"{PREFIX}http_active_requests", meaning, [Point(self.active, self._labels)])


class CountRequests:
    """Middleware that counts every request but scrapes, when its answer has ended."""

    def __init__(self, app: ASGIApp, counts: HttpCounts):
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == PATH:
            await self._app(scope, receive, send)
            return
        status = 500  # what the client gets if an exception comes out before an answer

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._counts.active += 1
        try:
            await self._app(scope, receive, noted)
        finally:
            self._counts.active -= 1
            self._counts.rejected += status == 503 and scope["method"] == "POST"
            route = scope.get("route")  # what the router chose: its path is a template, so there are as many as routes
            self._counts.answered[route.path if isinstance(route, Route) else OTHER, f"{status // 100}xx"] += 1


def add_metrics(app: FastAPI, engine: AsyncEngine, metrics: Metrics) -> None:
    """Adds /metrics to the application, and counts its requests: those that middleware added before refuses, too."""
    counts = HttpCounts(metrics.labels["model_name"])
    registry = CollectorRegistry()
    for collector in (EngineCollector(engine, metrics.labels), metrics, counts):
        registry.register(collector)
    app.add_middleware(CountRequests, counts=counts)

    @app.get(PATH, response_class=PlainTextResponse, responses={200: {"content": {OPENMETRICS: {}}}})
    async def show_metrics(request: Request) -> Response:
        """What the server has counted, in Prometheus' text format or, if the client accepts it, in OpenMetrics'."""
        if accepts_openmetrics(request.headers.get("accept", "")):
            text = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # the default one changes our colons
            return Response(text, media_type=openmetrics.CONTENT_TYPE_LATEST)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def accepts_openmetrics(accept: str) -> bool:
    """By the media type alone, as Prometheus' preferences need no more (prometheus_client's own choice fails on odd versions)."""
    return any(part.partition(";")[0].strip() == OPENMETRICS for part in accept.split(","))
