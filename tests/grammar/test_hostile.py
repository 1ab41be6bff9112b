"""Grammars over HTTP, down to a real engine: every keyword, and what somebody might send to harm a server."""

import json
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxspec.server.model import ServedModel
from jaxspec.testing import tiny_engine, tiny_target
from tests.grammar.cases import TREES
from tests.grammar.hostile_schemas import Hostile, hostile
from tests.grammar.keywords import KEYWORDS, PROGRAMS, REFUSED
from tests.grammar.test_keywords import validator
from tests.server.conftest import serving
from tests.server.fakes import byte_tokenizer

pytestmark = pytest.mark.exhaustive
COUNT, SENDERS, MOST_SECONDS = 2000, 3, 60
PATH = "/v1/completions"
CANARIES = (
    {"prompt": "hello", "max_tokens": 48, "temperature": 0.9, "seed": 5, "ignore_eos": True},
    {"prompt": "hello", "max_tokens": 48, "temperature": 0.9, "seed": 6, "regex": "[a-z]{40,50}"},
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    target = tiny_target(num_layers=2, vocab_size=256, eos_token_ids=(0,), max_position_embeddings=512)
    engine = tiny_engine(TREES[0], target=target, max_running_requests=8, num_pages=300)
    with serving(engine, ServedModel("tiny", engine.context_length, engine.tree, byte_tokenizer())) as url:
        yield url


def test_every_keyword_over_http(url):
    """What ends by itself fits; the rest is text as well. The refused are those that are listed."""
    table = KEYWORDS | PROGRAMS

    def ask(asked: tuple[str, int]) -> tuple[str, str]:
        name, seed = asked
        body = {"prompt": "x", "max_tokens": 100, "temperature": 1, "seed": seed, "json_schema": json.dumps(table[name].schema)}
        response = httpx.post(url + PATH, json=body, timeout=MOST_SECONDS)
        assert response.status_code in (200, 400), (name, response.text)
        if response.status_code == 400:
            assert response.json()["error"]["param"] == "json_schema"
            return name, "refused"
        [choice] = response.json()["choices"]
        if choice["finish_reason"] == "stop":
            validator(table[name].schema).validate(json.loads(choice["text"]))
        return name, choice["finish_reason"]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, [(name, seed) for name in table for seed in range(2)]))
    assert {name for name, reason in found if reason == "refused"} == set(REFUSED)
    reasons = Counter(reason for _, reason in found)
    assert set(reasons) == {"refused", "stop", "length"} and reasons["stop"] > 80, reasons


class Canary:
    """Requests of somebody else, one after the other, as long as it is watched."""

    def __init__(self, url: str):
        self._url, self._texts = url + PATH, [""] * len(CANARIES)
        for number, asked in enumerate(CANARIES):
            self._texts[number] = self._text(asked)
        self.alone = statistics.median([self.seconds() for _ in range(20)])

    def seconds(self) -> float:
        """What all take together. Their texts must be what they were."""
        started = time.perf_counter()
        assert [self._text(asked) for asked in CANARIES] == self._texts
        return time.perf_counter() - started

    def _text(self, asked: dict) -> str:
        response = httpx.post(self._url, json=asked, timeout=MOST_SECONDS)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]


def test_hostile_grammars_harm_nobody(url):
    canary, rng = Canary(url), random.Random(35)
    asked = [hostile(rng) for _ in range(COUNT)]
    outcomes: Counter[tuple[str, int]] = Counter()

    def send(some: list[Hostile]) -> None:
        with httpx.Client(base_url=url, timeout=MOST_SECONDS) as http:
            for each in some:
                body = {"prompt": "x", "max_tokens": 24, "temperature": 1.2, "seed": 1, each.field: each.value}
                started = time.perf_counter()
                response = http.post(PATH, content=json.dumps(body), headers={"content-type": "application/json"})
                seconds = time.perf_counter() - started
                said = (each.family, str(each.value)[:300], response.text[:300], seconds)
                assert response.status_code in (200, 400) and seconds < MOST_SECONDS / 2, said
                assert response.status_code == 200 or response.json()["error"]["message"], said
                outcomes[each.family, response.status_code] += 1
                if response.status_code == 200 and each.field == "json_schema":
                    [choice] = response.json()["choices"]
                    assert choice["finish_reason"] in ("stop", "length", "error"), said
                    if choice["finish_reason"] == "stop" and each.family != "guided":  # whose separators need not be JSON's
                        json.loads(choice["text"])

    with ThreadPoolExecutor(SENDERS) as pool:
        sent = [pool.submit(send, asked[place::SENDERS]) for place in range(SENDERS)]
        beside = []
        while not all(each.done() for each in sent):
            beside.append(canary.seconds())
        for each in sent:
            each.result()
    print(
        dict(sorted(outcomes.items())), f"the canary's time: {statistics.median(beside) / canary.alone:.2f} of {canary.alone:.3f} s"
    )
    assert statistics.median(beside) < 3 * canary.alone
    assert sum(count for (_, status), count in outcomes.items() if status == 200) > COUNT / 5
    assert threading.active_count() < 60
