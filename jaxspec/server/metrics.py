"""/metrics: the counters of the engine, its requests and the HTTP layer, in Prometheus' text formats.

The engine's metrics are declared in jaxspec/engine/stats.py, those of requests here. Names follow Prometheus' rules: a prefix, the
unit last, `_total` after counters. Where vLLM or SGLang has the same number, it appears under that name too, so that their tools
(benchmarks, dashboards, Kubernetes' inference gateway) work with this server.
docs/metrics.md lists every metric; a test compares the two.

A scrape reads the engine's newest EngineStats, which the engine's thread replaces as a whole: neither waits for the other.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter
from typing import NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CollectorRegistry, Histogram, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.engine.driver import EngineThread, Observer
from jaxspec.engine.request import GenerationOutput
from jaxspec.engine.stats import ENGINE_METRICS, EngineStats

PREFIX = "jaxspec:"
KEPT_STEPS = 32
"""How many cycle times are kept for each number of requests."""
WINDOW = 10.0
"""Seconds over which the rate of generated tokens is averaged."""


class RequestMetric(NamedTuple):
    """A histogram over all requests that ended."""

    name: str
    meaning: str
    read: Callable[[GenerationOutput], float | None]
    """None if the request has no such number."""
    buckets: tuple[float, ...]
    """Upper bounds; an unbounded one follows them."""
    aliases: str = ""
    """The names of the same number at other servers, with their prefixes."""


def time_per_output_token(output: GenerationOutput) -> float | None:
    """Seconds from the first token to the end, per token after the first; None if there is none."""
    first, later = output.timing.first_token_seconds, len(output.token_ids) - 1
    return None if first is None or later < 1 else (output.timing.total_seconds - first) / later


def prefill_and_decode(output: GenerationOutput) -> tuple[float, float] | tuple[None, None]:
    """Seconds from the launch of the first prefill chunk to the first token, and from there to the end; None without a token."""
    timing = output.timing
    if timing.first_token_seconds is None:
        return None, None
    return timing.first_token_seconds - timing.queue_seconds, timing.total_seconds - timing.first_token_seconds


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
SECONDS_PER_TOKEN = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5
)  # fmt: skip
TOKENS = tuple(float(digit * 10**zeros) for zeros in range(6) for digit in (1, 2, 5))
ACCEPT_LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)

REQUEST_METRICS = (
    RequestMetric("queue_seconds", "From arrival to the launch of the first prefill chunk, or to the end if there was none.",
                  lambda output: output.timing.queue_seconds, SECONDS, "vllm:request_queue_time_seconds"),
    RequestMetric("time_to_first_token_seconds", "From arrival to the first token; requests without a token don't count.",
                  lambda output: output.timing.first_token_seconds, SECONDS,
                  "vllm:time_to_first_token_seconds sglang:time_to_first_token_seconds"),
    RequestMetric("prefill_seconds", "From the launch of the first prefill chunk to the first token.",
                  lambda output: prefill_and_decode(output)[0], SECONDS, "vllm:request_prefill_time_seconds"),
    RequestMetric("decode_seconds", "From the first token to the end.",
                  lambda output: prefill_and_decode(output)[1], SECONDS, "vllm:request_decode_time_seconds"),
    RequestMetric("time_per_output_token_seconds", "From the first token to the end, per token after the first.",
                  time_per_output_token, SECONDS_PER_TOKEN,
                  "vllm:request_time_per_output_token_seconds vllm:inter_token_latency_seconds sglang:inter_token_latency_seconds"),
    RequestMetric("request_seconds", "From arrival to the end.",
                  lambda output: output.timing.total_seconds, SECONDS,
                  "vllm:e2e_request_latency_seconds sglang:e2e_request_latency_seconds"),
    RequestMetric("request_prompt_tokens", "Tokens of the prompt.",
                  lambda output: len(output.prompt_token_ids), TOKENS, "vllm:request_prompt_tokens"),
    RequestMetric("request_generated_tokens", "Tokens that were generated.",
                  lambda output: len(output.token_ids), TOKENS,
                  "vllm:request_generation_tokens vllm:request_max_num_generation_tokens"),
    RequestMetric("request_accept_length_tokens", "Tokens per verification of a draft tree, bonus included.",
                  lambda output: output.speculation.tree_accept_length, ACCEPT_LENGTHS),
)  # fmt: skip

PATH = "/metrics"
OPENMETRICS = "application/openmetrics-text"
OTHER = "other"
"""The path shown for requests that reached no route: an unknown path, a missing key, a body that is too large."""


class Sample(NamedTuple):
    """One line of a metric."""

    value: float
    labels: Mapping[str, str]
    suffix: str = ""
    """After the name: a histogram has several."""


def family(kind: str, name: str, meaning: str, samples: Iterable[Sample]) -> Metric:
    """A metric with all its lines."""
    result = Metric(name.removesuffix("_total"), meaning, kind)
    for sample in samples:
        result.add_sample(name + sample.suffix, dict(sample.labels), sample.value)
    return result


def with_aliases(kind: str, name: str, aliases: str, meaning: str, samples: list[Sample]) -> Iterator[Metric]:
    """A metric under our name and those of other servers."""
    yield family(kind, PREFIX + name, meaning, samples)
    for alias in aliases.split():
        yield family(kind, alias, f"{meaning} The same as {PREFIX}{name}.", samples)


class Throughput:
    """Tokens per second over about the last WINDOW seconds, from the counts at earlier scrapes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def after(self, tokens: int, now: float) -> float:
        """The rate. `tokens`: all that were generated so far; `now`: in seconds. The first call returns 0."""
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW:
            self._seen.popleft()
        self._seen.append((now, tokens))
        since, before = self._seen[0]
        return (tokens - before) / (now - since) if now > since else 0.0


class RequestCollector(Observer):
    """Histograms of the requests that ended. Scrapes may come from any thread."""

    def __init__(self, model_name: str):
        self.labels = {"model_name": model_name, "engine": "0"}
        """Labels of all metrics of the engine and its requests, as in vLLM; there is one engine."""
        self._histograms = [
            (metric, Histogram(PREFIX + metric.name, metric.meaning, registry=None, buckets=metric.buckets))
            for metric in REQUEST_METRICS
        ]

    def finished(self, output: GenerationOutput) -> None:
        for metric, histogram in self._histograms:
            value = metric.read(output)
            if value is not None:
                histogram.observe(value)

    def collect(self) -> Iterator[Metric]:
        for metric, histogram in self._histograms:
            [observed] = histogram.collect()
            samples = [
                Sample(each.value, self.labels | each.labels, suffix)
                for each in observed.samples
                if (suffix := each.name.removeprefix(observed.name)) != "_created"  # these series carry no information
            ]
            yield from with_aliases("histogram", metric.name, metric.aliases, metric.meaning, samples)


class StepTimes(Observer):
    """The latest cycles' times, as SGLang's bench_speculative reads them."""

    def __init__(self) -> None:
        self._last = EngineStats()
        self._seconds: dict[int, deque[float]] = {}

    def after_step(self, stats: EngineStats, idle: bool) -> None:
        last, self._last = self._last, stats
        requests = stats.verify_count - last.verify_count
        if requests and stats.cycles == last.cycles + 1 and stats.prefilled_tokens == last.prefilled_tokens:
            times = self._seconds.setdefault(requests, deque(maxlen=KEPT_STEPS))
            times.append(round(stats.step_seconds - last.step_seconds, 6))

    @property
    def by_batch(self) -> dict[str, list[float]]:
        """Seconds by the number of requests, the oldest first."""
        return {str(requests): list(self._seconds[requests]) for requests in sorted(self._seconds)}


class EngineCollector:
    """The engine's own counts at the time of a scrape."""

    def __init__(self, engine: EngineThread, labels: Mapping[str, str]):
        self._engine, self._labels, self._throughput = engine, dict(labels), Throughput()

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats  # once, so that all numbers are consistent
        for metric in ENGINE_METRICS:
            value = metric.read(stats)
            if isinstance(value, Mapping):
                assert metric.label is not None
                samples = [Sample(number, self._labels | {metric.label: key}) for key, number in value.items()]
            else:
                samples = [Sample(value, self._labels)]
            kind = "counter" if metric.name.endswith("_total") else "gauge"
            yield from with_aliases(kind, metric.name, metric.aliases, metric.meaning, samples)
        rate = [Sample(self._throughput.after(stats.generated_tokens, perf_counter()), self._labels)]
        meaning = "Generated tokens per second, over about ten seconds."
        yield from with_aliases("gauge", "generated_tokens_per_second", "sglang:gen_throughput", meaning, rate)
        healthy = [Sample(self._engine.is_healthy, self._labels)]
        yield family("gauge", f"{PREFIX}engine_healthy", "1 while the engine works, 0 after it has failed or ended.", healthy)
        config = self._labels | {"block_size": str(stats.page_size), "num_gpu_blocks": str(stats.total_pages)}
        meaning = f"{PREFIX}cache_page_size_tokens and {PREFIX}cache_total_pages as labels."
        yield family("gauge", "vllm:cache_config_info", meaning, [Sample(1, config)])


class HttpCounts:
    """Counts of HTTP requests, written and read in the event loop's thread."""

    def __init__(self, model_name: str):
        self._labels = {"model_name": model_name}
        self.answered: Counter[tuple[str, str]] = Counter()
        """By path and class of the status."""
        self.rejected = self.active = 0

    def collect(self) -> Iterator[Metric]:
        answered = [
            Sample(count, self._labels | {"path": path, "status": status}) for (path, status), count in self.answered.items()
        ]
        yield family("counter", f"{PREFIX}http_requests_total", "HTTP requests, by path and class of the status.", answered)
        meaning = "POST requests answered with 503: the queue was full, the engine had failed, or the server was shutting down."
        yield family("counter", f"{PREFIX}http_rejected_requests_total", meaning, [Sample(self.rejected, self._labels)])
        meaning = "HTTP requests in progress, streams included."
        yield family("gauge", f"{PREFIX}http_active_requests", meaning, [Sample(self.active, self._labels)])


class CountRequests:
    """Middleware that counts every request except scrapes, when its response has ended."""

    def __init__(self, app: ASGIApp, counts: HttpCounts):
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == PATH:
            await self._app(scope, receive, send)
            return
        status = 500  # the client's status if an exception precedes the response

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._counts.active += 1
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._counts.active -= 1
            self._counts.rejected += status == 503 and scope["method"] == "POST"
            route = scope.get("route")  # its path is a template, so clients can't make up new ones
            self._counts.answered[route.path if isinstance(route, Route) else OTHER, f"{status // 100}xx"] += 1


def add_metrics(app: FastAPI, engine: EngineThread, requests: RequestCollector) -> None:
    """Adds /metrics to the application. Requests refused by middleware that was added earlier count, too."""
    counts = HttpCounts(requests.labels["model_name"])
    registry = CollectorRegistry()
    for collector in (EngineCollector(engine, requests.labels), requests, counts):
        registry.register(collector)
    app.add_middleware(CountRequests, counts=counts)

    @app.get(PATH, response_class=PlainTextResponse, responses={200: {"content": {OPENMETRICS: {}}}})
    async def show_metrics(request: Request) -> Response:
        """The server's counts, in Prometheus' text format or, if the client accepts it, in OpenMetrics'."""
        if accepts_openmetrics(request.headers.get("accept", "")):
            text = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # the default changes colons
            return Response(text, media_type=openmetrics.CONTENT_TYPE_LATEST)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def accepts_openmetrics(accept: str) -> bool:
    """Decides by the media type alone, which is enough for Prometheus; prometheus_client's own choice fails on odd versions."""
    return any(part.partition(";")[0].strip() == OPENMETRICS for part in accept.split(","))
