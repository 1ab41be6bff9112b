"""What probes, routers and benchmarks read, and how the owner controls the server. test_running.py tests what ends."""

from dataclasses import replace

import pytest

from jaxspec.engine.stats import AdaptiveState, EngineStats
from jaxspec.server.metrics import KEPT_STEPS, StepTimes
from jaxspec.server.settings import ServerSettings
from jaxspec.server.sglang.info import without_directory
from jaxspec.tree_shape import TreeShape
from jaxspec.version import own_version
from tests.server.conftest import Client, served, wait_until
from tests.server.fakes import CONTEXT, TREE
from tests.server.test_bad_input import refusal

HEALTH = ["/health", "/ready", "/ping"]


@pytest.mark.parametrize("path", [*HEALTH, "/health_generate"])
def test_a_healthy_server(client: Client, path: str):
    response = client.http.get(path)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", HEALTH)
def test_a_failing_engine(client: Client, path: str):
    client.engine.failures = 3
    for _ in range(3):
        assert client.post("/v1/completions", prompt="x").status_code == 500
    response = client.http.get(path)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["type"] == "server_error"


def test_the_probe_makes_a_token(client: Client):
    assert client.http.get("/health_generate").status_code == 200
    assert [params.max_tokens for params in client.engine.params] == [1] and client.engine.priorities == [2**31 - 1]
    client.engine.failures = 1
    response = client.http.get("/health_generate")
    assert (response.status_code, "not made a token" in response.json()["error"]["message"]) == (503, True)


def test_version(client: Client):
    assert client.http.get("/version").json() == {"version": own_version()}


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info_names_no_path(client: Client, path: str):
    info = client.http.get(path).json()
    assert (info["model_path"], info["tokenizer_path"], info["served_model_name"]) == ("fake", None, "fake")
    assert info["is_generation"] is True and info["context_length"] == CONTEXT


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info(client: Client, path: str):
    info = client.http.get(path).json()
    assert info["version"] == own_version() and info["served_model_name"] == info["model_path"] == "fake"
    assert (info["tree"], info["speculative_num_steps"], info["max_total_num_tokens"]) == (str(TREE), 3, 160)
    assert info["step_time_dict"] == {}


def test_steps_are_timed_by_the_number_of_requests_in_them():
    """SGLang's bench_speculative reads them."""
    steps, stats = StepTimes(), EngineStats()
    for changes in (
        {"prefilled_tokens": 9, "step_seconds": 1.0},
        {"cycles": 1, "verify_count": 2, "prefilled_tokens": 12, "step_seconds": 2.0},  # beside a prefill
        {"cycles": 2, "verify_count": 4, "step_seconds": 2.25},
        {"step_seconds": 2.5},  # no cycle
        {"cycles": 3, "verify_count": 6, "step_seconds": 3.0},
        {"cycles": 4, "verify_count": 7, "step_seconds": 3.125},
    ):
        stats = replace(stats, **changes)
        steps.after_step(stats, False)
    assert steps.by_batch == {"1": [0.125], "2": [0.25, 0.5]}
    for _ in range(100):
        stats = replace(stats, cycles=stats.cycles + 1, verify_count=stats.verify_count + 1)
        steps.after_step(stats, False)
    assert len(steps.by_batch["1"]) == KEPT_STEPS


def test_the_accept_length_is_that_since_the_flush(client: Client):
    """SGLang's benchmark flushes the cache, runs, and prints it."""

    def accept_length() -> float | None:
        return client.http.get("/server_info").json()["internal_states"][0].get("avg_spec_accept_length")

    client.post("/v1/completions", prompt="x", max_tokens=11)
    assert client.http.post("/flush_cache").status_code == 200
    assert accept_length() is None
    client.post("/v1/completions", prompt="x", max_tokens=11)  # one token, then five times two
    assert accept_length() == 2.0
    client.post("/v1/completions", prompt="x", max_tokens=2)  # one, and one that the budget cut
    assert accept_length() == pytest.approx(11 / 6, abs=1e-4)


def test_an_adaptive_server_shows_the_trees_it_uses(client: Client):
    state = client.http.get("/server_info").json()["internal_states"][0]
    assert "adaptive_trees" not in state
    plain = TreeShape(num_steps=0)
    client.engine.adaptive = AdaptiveState(TREE, {2: plain, 1: TREE}, {TREE: 2.25, plain: 1.0}, {(TREE, 1): 0.1}, 3, 1)
    client.post("/v1/completions", prompt="x", max_tokens=2)
    state = client.http.get("/server_info").json()["internal_states"][0]
    assert state["adaptive_trees"] == {
        "current": "3/2/5",
        "best": {"1": "3/2/5", "2": "0/1/1"},
        "accept_lengths": {"3/2/5": 2.25, "0/1/1": 1.0},
        "switches": 3,
    }


def test_settings_and_trees():
    trees = (TreeShape(5, 4, 8), TreeShape(3, 1, 4), TreeShape(num_steps=0))
    shown = {
        "model_path": "/home/someone/models/llama",
        "speculative_draft_model_path": "../heads/eagle",
        "mem_fraction_static": 0.8,
    }
    with served(ServerSettings(shown=shown), name="my-model", tree=trees[0], trees=trees) as client:
        response = client.http.get("/server_info")
    info = response.json()
    assert info["speculative_trees"] == ["5/4/8", "3/1/4", "0/1/1"]
    assert (info["tree"], info["model_path"], info["mem_fraction_static"]) == ("5/4/8", "my-model", 0.8)
    assert info["speculative_draft_model_path"] == "eagle" and "someone" not in response.text


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("/a/b", "b"),
        ("./a/b", "b"),
        ("../b", "b"),
        ("~/b/", "b"),
        ("org/model", "org/model"),
        ("EAGLE", "EAGLE"),
        (7, 7),
        (None, None),
    ],
)
def test_without_directory(setting, shown):
    assert without_directory(setting) == shown


@pytest.mark.parametrize("path", ["/v1/loads", "/loads", "/v1/loads?include=core,disagg,queues,memory"])
def test_loads(client: Client, path: str):
    """What routers read; smg's request has these sections."""
    client.engine.allow(1)
    with client.http.stream("POST", "/generate", json={"text": "hello", "stream": True}):
        wait_until(lambda: client.engine.running == 1)
        answer = client.http.get(path).json()
    [load] = answer["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (1, 0, 1)
    assert (load["num_used_tokens"], load["max_total_num_tokens"], load["token_usage"]) == (16, 160, 0.1)
    assert (answer["aggregate"]["total_reqs"], answer["dp_rank_count"]) == (1, 1)


# Control


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("query", ["", "?timeout=0", "?timeout=30.5", "?timeout=3600"])
def test_flushing_the_cache(client: Client, method: str, query: str):
    before = client.engine.flushes
    response = client.http.request(method, f"/flush_cache{query}")
    assert (response.status_code, response.text) == (200, "Cache flushed.\n")
    assert response.headers["content-type"].startswith("text/plain")
    assert client.engine.flushes == before + 1


@pytest.mark.parametrize("timeout", ["-1", "3601", "soon", "nan", "inf", "", "1e999"])
def test_what_is_no_timeout(client: Client, timeout: str):
    assert refusal(client.http.post(f"/flush_cache?timeout={timeout}"), 400)["param"] == "timeout"


def test_other_methods_are_told_which_there_are(client: Client):
    response = client.http.put("/flush_cache")
    assert refusal(response, 405) and response.headers["allow"] == "GET, POST"


def test_ending_what_is_not_there(client: Client):
    assert client.post("/abort_request", rid="nothing").json() == {"aborted": 0}
    for rid in (None, ""):  # which SGLang's clients send
        assert client.post("/abort_request", rid=rid, abort_all=True).json() == {"aborted": 0}
