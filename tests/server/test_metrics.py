"""/metrics: valid in both formats, equal to what the engine counted, and what the documentation and the dashboard say it is."""

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from jaxspec.engine.driver import Observer
from jaxspec.engine.request import GenerationOutput, Timing
from jaxspec.engine.speculation import CycleCounts, Speculation
from jaxspec.engine.stats import ENGINE_METRICS, FINISH_REASONS, EngineStats
from jaxspec.server.bodies import MAX_BODY_BYTES
from jaxspec.server.metrics import (
    PREFIX,
    REQUEST_METRICS,
    CountRequests,
    EngineCollector,
    HttpCounts,
    RequestCollector,
    Throughput,
    accepts_openmetrics,
)
from tests.server.conftest import Client, wait_until

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "metrics.md").read_text()
BOARD = json.loads((DOCS / "dashboards/jaxspec.json").read_text())
OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"


@dataclass
class Scrape:
    """What one scrape showed."""

    families: list[Metric]

    @property
    def samples(self) -> dict[str, float]:
        """By name and, in braces, the labels that not every sample has."""
        shown = {}
        for family in self.families:
            for sample in family.samples:
                labels = [f"{key}={value}" for key, value in sample.labels.items() if key not in ("model_name", "engine")]
                shown[sample.name + (f"{{{','.join(sorted(labels))}}}" if labels else "")] = sample.value
        return shown

    def __getitem__(self, name: str) -> float:
        return self.samples.get(name, 0)


def scrape(client: Client) -> Scrape:
    response = client.http.get("/metrics")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return Scrape(list(parse_text(response.text)))


@dataclass
class EngineOf:
    """What the collector needs of an engine."""

    stats: EngineStats
    is_healthy: bool = True


# The engine's numbers

DISTINCT = EngineStats(
    **{item.name: number for number, item in enumerate(fields(EngineStats), 3) if item.type in (int, float)},
    finished={"stop": 100, "error": 101, "something new": 102},
    accepted_per_position=(103, 104, 105),
    drafts_by_sampling={"greedy": 106},
    accepted_by_sampling={"sampled": 107},
    drafted_by_source={"head": 108},
    accepted_by_source={"head+ngram": 109},
)  # fmt: skip


def test_every_number_of_the_stats_is_shown():
    shown = Scrape(list(EngineCollector(EngineOf(DISTINCT), {}).collect())).samples
    own = {name.removeprefix(PREFIX): value for name, value in shown.items() if name.startswith(PREFIX)}
    for item in fields(EngineStats):
        value = getattr(DISTINCT, item.name)
        if isinstance(value, int | float):
            assert value in own.values(), item.name
    assert own["running_requests"] == DISTINCT.running and own["waiting_requests"] == DISTINCT.waiting
    assert own["drafts_total"] == DISTINCT.draft_count and own["accepted_tokens_total"] == DISTINCT.accepted_tokens
    assert own["cache_usage_ratio"] == DISTINCT.used_pages / DISTINCT.total_pages
    assert own["finished_requests_total{finished_reason=something new}"] == 102
    assert {reason: own[f"finished_requests_total{{finished_reason={reason}}}"] for reason in FINISH_REASONS} == (
        dict.fromkeys(FINISH_REASONS, 0) | {"stop": 100, "error": 101}
    )
    assert [own[f"accepted_tokens_per_position_total{{position={position}}}"] for position in range(3)] == [103, 104, 105]
    assert own["drafts_by_sampling_total{sampling=greedy}"] == 106 and own["drafts_by_sampling_total{sampling=sampled}"] == 0
    assert own["accepted_tokens_by_sampling_total{sampling=sampled}"] == 107
    assert own["draft_tokens_by_source_total{source=head}"] == 108
    assert own["accepted_tokens_by_source_total{source=head+ngram}"] == 109
    assert shown[f"vllm:cache_config_info{{block_size={DISTINCT.page_size},num_gpu_blocks={DISTINCT.total_pages}}}"] == 1


def test_health_is_shown():
    for healthy in (True, False):
        assert Scrape(list(EngineCollector(EngineOf(DISTINCT, healthy), {}).collect()))["jaxspec:engine_healthy"] == healthy


VLLM = """
    num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info spec_decode_num_drafts_total
    spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total spec_decode_num_accepted_tokens_per_pos_total
    prompt_tokens_total generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total
    request_success_total time_to_first_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_time_per_output_token_seconds inter_token_latency_seconds request_prefill_time_seconds request_decode_time_seconds
    request_prompt_tokens request_generation_tokens request_max_num_generation_tokens
"""
"""What its benchmark, its dashboard and Kubernetes' gateway read."""
SGLANG = """
    e2e_request_latency_seconds time_to_first_token_seconds num_running_reqs gen_throughput cache_hit_rate num_queue_reqs
    token_usage
"""
"""What its dashboard reads."""
OTHERS = [f"vllm:{name}" for name in VLLM.split()] + [f"sglang:{name}" for name in SGLANG.split()]


def test_the_names_that_tools_of_other_servers_look_for_are_there(client: Client):
    assert not set(OTHERS) - set(exposed(scrape(client)))
    for family in scrape(client).families:
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake", sample.name
            assert sample.labels.get("engine") == "0" or not sample.name.startswith(("vllm:", "sglang:")), sample.name


def test_aliases_agree(client: Client):
    client.post("/v1/completions", prompt="agree", max_tokens=7)
    samples = scrape(client).samples
    pairs = [(metric.name, alias) for metric in (*ENGINE_METRICS, *REQUEST_METRICS) for alias in metric.aliases.split()]
    assert {alias for _, alias in pairs} >= set(OTHERS) - {"vllm:cache_config_info", "sglang:gen_throughput"}
    for name, alias in pairs:
        ours, theirs = samples_of(PREFIX + name, samples), samples_of(alias, samples)
        assert ours and ours == theirs, name


def test_throughput_is_that_of_the_last_seconds():
    throughput = Throughput()
    assert throughput.after(0, 100.0) == 0
    assert throughput.after(50, 105.0) == 10
    assert throughput.after(50, 105.0) == 10
    assert throughput.after(250, 115.0) == 20  # since 105
    assert throughput.after(250, 200.0) == 0


def samples_of(name: str, samples: Mapping[str, float]) -> dict[str, float]:
    """Those of one metric, by what comes after its name."""
    rest = re.compile(rf"{name}((?:_bucket|_sum|_count)?(?:{{.*)?)")
    return {match[1]: value for key, value in samples.items() if (match := rest.fullmatch(key))}


# Histograms of requests

CYCLES = st.lists(st.builds(CycleCounts, st.integers(1, 6), st.integers(0, 5), st.sampled_from([0, 4]), st.just(5)), max_size=6)
OUTPUTS = st.builds(
    GenerationOutput,
    request_id=st.just("request"),
    prompt_token_ids=st.lists(st.just(1), min_size=1, max_size=60).map(tuple),
    text=st.just(""),
    token_ids=st.lists(st.just(1), max_size=60).map(tuple),
    finish_reason=st.sampled_from(FINISH_REASONS),
    matched_stop=st.none(),
    speculation=CYCLES.map(lambda cycles: Speculation(tuple(cycles))),
    timing=st.builds(Timing, st.floats(0, 1), st.none() | st.floats(0, 2000), st.floats(2000, 4000)),
)


@given(st.lists(OUTPUTS, max_size=12))
def test_histograms_count_every_value_once(outputs: list[GenerationOutput]):
    metrics = RequestCollector("model")
    assert isinstance(metrics, Observer)
    for output in outputs:
        metrics.finished(output)
    shown = Scrape(list(metrics.collect())).samples
    with_tree = [output.speculation.with_tree for output in outputs]
    began = [output.timing for output in outputs if output.timing.first_token_seconds is not None]
    expected: Mapping[str, Sequence[float]] = {
        "prefill_seconds": [timing.first_token_seconds - timing.queue_seconds for timing in began],
        "decode_seconds": [timing.total_seconds - timing.first_token_seconds for timing in began],
        "queue_seconds": [output.timing.queue_seconds for output in outputs],
        "time_to_first_token_seconds": [at for output in outputs if (at := output.timing.first_token_seconds) is not None],
        "time_per_output_token_seconds": [
            (output.timing.total_seconds - at) / (len(output.token_ids) - 1)
            for output in outputs
            if (at := output.timing.first_token_seconds) is not None and len(output.token_ids) > 1
        ],
        "request_seconds": [output.timing.total_seconds for output in outputs],
        "request_prompt_tokens": [len(output.prompt_token_ids) for output in outputs],
        "request_generated_tokens": [len(output.token_ids) for output in outputs],
        "request_accept_length_tokens": [sum(c.emitted for c in cycles) / len(cycles) for cycles in with_tree if cycles],
    }
    assert set(expected) == {metric.name for metric in REQUEST_METRICS}
    for metric in REQUEST_METRICS:
        name, values = PREFIX + metric.name, expected[metric.name]
        assert shown[f"{name}_count"] == len(values) and shown[f"{name}_sum"] == pytest.approx(sum(values))
        buckets = {float(key.partition("le=")[2][:-1]): count for key, count in shown.items() if key.startswith(f"{name}_bucket")}
        assert buckets == {bound: sum(value <= bound for value in values) for bound in (*metric.buckets, math.inf)}


# Over HTTP


def exposed(shown: Scrape) -> Iterator[str]:
    """The names of all metrics, as the text format declares them."""
    for family in shown.families:
        yield family.name + ("_total" if family.type == "counter" else "")


def test_both_formats_are_valid_and_agree(client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Throughput, "after", lambda *_: 1.5)  # it depends on the time
    client.post("/v1/completions", prompt="valid", max_tokens=7)
    plain = scrape(client)
    response = client.http.get("/metrics", headers={"Accept": OPENMETRICS})
    assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert Scrape(list(parse_openmetrics(response.text))).samples == plain.samples  # this parser checks histograms too
    names = list(exposed(plain))
    assert len(names) == len(set(names)) > 40
    for family in plain.families:
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family.name
        assert all(sample.name.endswith("_total") == (family.type == "counter") for sample in family.samples)


@pytest.mark.parametrize(
    "accept",
    ["", "*/*", "text/plain;version=abc", "text/plain;version=" + "9" * 5000, "application/openmetrics-text-not", ";;,,=", "ü"],
)
def test_no_accept_header_is_too_odd(client: Client, accept: str):
    response = client.http.get("/metrics", headers={"Accept": accept.encode("latin-1")})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")


@given(st.text())
def test_openmetrics_is_chosen_by_its_name(rest: str):
    assert accepts_openmetrics(f"text/html, application/openmetrics-text;{rest},{rest}")
    assert not accepts_openmetrics(f"application/openmetrics-text{'x' + rest}".partition(",")[0])


def test_names_of_models_are_escaped():
    labels = {"model_name": 'a "b" \\ c\nd', "engine": "0"}
    assert RequestCollector(labels["model_name"]).labels == labels
    families = EngineCollector(EngineOf(DISTINCT), labels).collect()
    assert {sample.labels["model_name"] for family in families for sample in family.samples} == {labels["model_name"]}


def test_counts_are_the_engines(client: Client):
    before = scrape(client)
    for prompt, count in (("one", 3), ("two two", 8)):
        assert client.post("/v1/completions", prompt=prompt, max_tokens=count).status_code == 200
    client.engine.failures = 1
    assert client.post("/v1/completions", prompt="fails", max_tokens=4).status_code == 500
    with client.http.stream("POST", "/v1/completions", json={"prompt": "leaves", "max_tokens": 50, "stream": True}) as response:
        client.engine.allow(4)
        next(response.iter_lines())
    client.engine.allow(math.inf)
    wait_until(lambda: not client.engine.running)
    after, stats = scrape(client), client.engine.stats()
    gained = Counter({name: value - before[name] for name, value in after.samples.items()})
    assert after["jaxspec:prompt_tokens_total"] == stats.prompt_tokens
    assert gained["jaxspec:prompt_tokens_total"] == len("one" + "two two" + "fails" + "leaves")
    assert after["jaxspec:generated_tokens_total"] == stats.generated_tokens
    assert after["vllm:spec_decode_num_drafts_total"] == stats.draft_count > before["vllm:spec_decode_num_drafts_total"]
    assert after["vllm:spec_decode_num_accepted_tokens_per_pos_total{position=0}"] == stats.accepted_per_position[0]
    ended = {reason: gained[f"jaxspec:finished_requests_total{{finished_reason={reason}}}"] for reason in FINISH_REASONS}
    # It may end before we leave.
    assert ended == {"length": 2, "error": 1, "abort": 1, "stop": 0, "timeout": 0} or ended["length"] == 3
    assert gained["jaxspec:request_seconds_count"] == sum(ended.values()) == 4
    assert gained["jaxspec:time_to_first_token_seconds_count"] == 3  # the failed one had none
    assert gained["jaxspec:request_prompt_tokens_sum"] == gained["jaxspec:prompt_tokens_total"]
    assert gained["jaxspec:request_generated_tokens_sum"] == gained["jaxspec:generated_tokens_total"]


def test_a_scrape_does_not_wait_for_the_engine(client: Client):
    client.engine.allow(1)
    with client.http.stream("POST", "/v1/completions", json={"prompt": "slow", "max_tokens": 5, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        for _ in range(3):  # its thread is inside the next step now, and stays there
            shown = scrape(client)
        assert shown["jaxspec:running_requests"] == shown["vllm:num_requests_running"] == 1
        assert shown["jaxspec:http_active_requests"] == 1
        client.engine.allow(math.inf)
        assert list(lines)
    wait_until(lambda: scrape(client)["jaxspec:http_active_requests"] == 0)
    assert scrape(client)["jaxspec:running_requests"] == 0


def test_http_requests_are_counted_by_route_and_status(client: Client):
    def counts() -> Counter[str]:
        return Counter({name: value for name, value in scrape(client).samples.items() if name.startswith("jaxspec:http")})

    before = counts()
    assert client.post("/v1/completions", prompt="fine", max_tokens=2).status_code == 200
    assert client.post("/v1/completions", prompt="fine", max_tokens=-2).status_code == 400
    for path in ("/nowhere/1", "/nowhere/2"):
        assert client.http.get(path).status_code == 404
    assert client.http.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1)).status_code == 413
    client.engine.room = 0
    assert client.post("/v1/completions", prompt="too many", max_tokens=2).status_code == 503
    expected = {
        "jaxspec:http_requests_total{path=/v1/completions,status=2xx}": 1,
        "jaxspec:http_requests_total{path=/v1/completions,status=4xx}": 1,
        "jaxspec:http_requests_total{path=/v1/completions,status=5xx}": 1,
        "jaxspec:http_requests_total{path=other,status=4xx}": 3,
        "jaxspec:http_rejected_requests_total": 1,
    }
    wait_until(lambda: counts() - before == expected)


@pytest.mark.parametrize("status", [None, 503, 200])
def test_requests_that_end_with_an_exception_are_counted(status: int | None):
    counts = HttpCounts("model")

    async def breaks(scope, receive, send):
        assert counts.active == 1
        if status is not None:
            await send({"type": "http.response.start", "status": status, "headers": []})
        raise RuntimeError("a bug")

    async def ignore(_message):
        pass

    with pytest.raises(RuntimeError):
        asyncio.run(CountRequests(breaks, counts)({"type": "http", "path": "/x", "method": "POST"}, ignore, ignore))
    assert counts.answered == {("other", f"{(status or 500) // 100}xx"): 1}
    assert (counts.active, counts.rejected) == (0, status == 503)


# The documentation


def test_the_page_lists_every_metric(client: Client):
    row = re.compile(r"^\| `((?:jaxspec|vllm):\w+)` \| (\w+) \| ((?:`\w+:\w+` ?)*) ?\| (.+) \|$", re.MULTILINE)
    listed = {}
    for name, kind, aliases, meaning in row.findall(PAGE):
        listed[name] = (kind, meaning)
        for alias in re.findall(r"[\w:]+", aliases):
            listed[alias] = (kind, f"{meaning} The same as {name}.")
    shown = scrape(client)
    pairs = zip(exposed(shown), shown.families, strict=True)
    assert listed == {name: (family.type, family.documentation) for name, family in pairs}


def names_in(expression: str) -> list[str]:
    return re.findall(r"\b(?:jaxspec|vllm):\w+", expression)


def sample_names(client: Client) -> set[str]:
    client.post("/v1/completions", prompt="so that every counter has a sample", max_tokens=2)
    wait_until(lambda: "jaxspec:http_requests_total{path=/v1/completions,status=2xx}" in scrape(client).samples)
    return {sample.name for family in scrape(client).families for sample in family.samples}


def test_the_expressions_of_the_page_name_what_is_there(client: Client):
    expressions = re.findall(r"`([^`\n]*(?:rate\(|==)[^`\n]*)`", PAGE)
    assert len(expressions) > 8
    named = {name for expression in expressions for name in names_in(expression)}
    assert named and not named - sample_names(client)


PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def test_the_dashboard_names_what_is_there(client: Client):
    expressions = [target["expr"] for panel in PANELS for target in panel["targets"]]
    variables = [variable["definition"] for variable in BOARD["templating"]["list"] if variable["type"] == "query"]
    assert all(names_in(expression) for expression in (*expressions, *variables))
    assert not {name for expression in (*expressions, *variables) for name in names_in(expression)} - sample_names(client)
    for expression in expressions:
        assert len(names_in(expression)) == expression.count('{model_name=~"$model"')
        assert expression.count("(") == expression.count(")")
        assert not re.search(r"(?<!rate\()jaxspec:\w+_(?:total|bucket)\b", expression), "a counter is shown as a rate"


def test_the_dashboard_is_well_formed():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"] == [
        "Traffic", "Latency", "Speculation", "Cache", "Health"
    ]  # fmt: skip
    assert {variable["name"] for variable in BOARD["templating"]["list"]} == {"datasource", "model"}
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["title"] and panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(letters) == len(set(letters))
