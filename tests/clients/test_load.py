"""Many clients at once, most of them hostile: the server refuses, drops and forgets them, and serves the others as before."""

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.clients.conftest import gauge, numbers, wait_until_idle
from tests.clients.malformed import BREAKING_OFF, CHAT, COMPLETIONS, GENERATE, malformed
from tests.clients.raw_http import Connection, connected, request
from tests.live_server import LiveServer

STREAMS = 200
MALFORMED = 2000
SENDERS = 8
"""Connections that send malformed requests at the same time."""
TO_THE_END, AT_ONCE, IN_THE_MIDDLE, SLOWLY = "reads to the end", "hangs up at once", "hangs up in the middle", "reads byte by byte"
ENDINGS = {TO_THE_END: 8, AT_ONCE: 3, IN_THE_MIDDLE: 6, SLOWLY: 3}
"""What clients of streams do, and how often."""
PROMPTS = (
    "def main():\n",
    "class Stack:\n",
    "import os\n\ndef remove(path):",
    'text = "日本語 élan 😀"\n',
    "for index in range(10):\n",
)
SPECULATIVE = (None, {"enabled": False}, {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4})
SLOW_READERS = 8
SMALL_BUFFER = 4096


def test_a_storm_leaves_nothing_behind(server):
    """200 streams, whose clients hang up at random, among 2,000 malformed requests; three times, of which the first warms up."""
    before = usual_seconds(server)
    statuses: Counter[int] = Counter()
    sizes = []
    for seed in (1, 2, 2):
        statuses += asyncio.run(storm(server.url, random.Random(seed)))
        wait_until_idle(server)
        wait_until_closed(server)
        sizes.append(resident_bytes(server))
    after = usual_seconds(server)
    print(f"{dict(statuses)}, {[size >> 20 for size in sizes]} MiB, a request takes {before:.3f} s before, {after:.3f} s after")

    assert not [status for status in statuses if status >= 500 and status != 503], statuses
    assert statuses[200] > 3 * STREAMS / 2 and statuses[400] > 3 * MALFORMED / 2, statuses
    failed = sum(count for sample, count in numbers(server, "http_requests_total").items() if '"5xx"' in sample)
    assert failed == gauge(server, "http_rejected_requests_total")  # those answered with 503
    assert sizes[2] < 1.05 * sizes[1], [f"{size / 2**20:.0f} MiB" for size in sizes]
    assert after < 3 * before + 0.2, (before, after)


def test_clients_that_do_not_read_delay_no_others(server):
    """Their streams are more than the network takes in. The engine finishes them all the same, and others are served as ever."""
    before = usual_seconds(server)
    beside = asyncio.run(usual_seconds_beside_slow_readers(server))
    wait_until_closed(server)
    assert beside < 3 * before + 0.2


def test_the_largest_bodies_delay_no_others(server):
    """Eight clients send them without pause; each is refused, or costs as much as a request may."""
    before = statistics.median(seconds_of_short_requests(server, 40, max_tokens=16))
    stop, sent = threading.Event(), Counter[int]()

    def send(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=300) as http:
            for path, body in itertools.islice(itertools.cycle(large_bodies()), number, None):
                if stop.is_set():
                    return
                sent[http.post(path, content=body, headers={"content-type": "application/json"}).status_code] += 1

    with ThreadPoolExecutor(SENDERS) as pool:
        senders = [pool.submit(send, number) for number in range(SENDERS)]
        time.sleep(1)
        beside = statistics.median(seconds_of_short_requests(server, 40, max_tokens=16))
        stop.set()
    for sender in senders:
        sender.result()
    print(f"a short request takes {before:.3f} s alone, {beside:.3f} s beside {dict(sent)}")
    assert set(sent) <= {200, 400, 413} and sent[400] > 3 and sent[413] > 0
    assert beside < 3 * before, (before, beside)


def large_bodies() -> list[tuple[str, bytes]]:
    """As much as a body may hold, of everything that takes long, and more than it may hold."""
    message, text = b'{"role":"user","content":"a"}', b'{"type":"text","text":""}'
    return [
        (CHAT, b'{"messages":[' + b",".join([message] * 60_000) + b"]}"),
        (CHAT, b'{"messages":[{"role":"user","content":[' + b",".join([text] * 70_000) + b"]}]}"),
        (COMPLETIONS, b'{"prompt":[' + b",".join([b"1"] * 290_000) + b"]}"),
        (COMPLETIONS, b'{"prompt":[' + b",".join([b"[]"] * 140_000) + b"]}"),
        (COMPLETIONS, b'{"prompt":"a","max_tokens":1,"metadata":{' + b",".join(b'"%d":0' % n for n in range(140_000)) + b"}}"),
        (COMPLETIONS, b'{"prompt":"' + b"hello " * 340_000 + b'"}'),
        (GENERATE, b'{"text":"' + b"\\u4e2d" * 340_000 + b'"}'),
        (CHAT, b'{"messages":[' + b",".join([message] * 500_000) + b"]}"),
    ]


async def storm(url: str, chance: random.Random) -> Counter[int]:
    """All of it at the same time; returns the statuses that came back."""
    statuses: Counter[int] = Counter()
    wrong = [malformed(chance) for _ in range(MALFORMED)]
    async with asyncio.TaskGroup() as group:
        for ending in chance.choices(list(ENDINGS), ENDINGS.values(), k=STREAMS):
            group.create_task(stream(url, streamed(chance), ending, chance.randint(1, 5), statuses))
        for sender in range(SENDERS):
            group.create_task(refused(url, wrong[sender::SENDERS], statuses))
        group.create_task(break_off(url))
    return statuses


def streamed(chance: random.Random) -> bytes:
    """A request for a stream."""
    path, prompt, tokens = chance.choice([COMPLETIONS, CHAT, GENERATE]), chance.choice(PROMPTS), chance.randint(4, 16)
    common: dict[str, Any] = {"stream": True, "speculative": chance.choice(SPECULATIVE)}
    sampling = {"temperature": chance.choice([0, 0.8]), "ignore_eos": True, "n": chance.choice([1, 1, 1, 2])}
    if path == GENERATE:
        body = common | {"text": prompt, "sampling_params": sampling | {"max_new_tokens": tokens}}
    elif path == CHAT:
        body = common | sampling | {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "logprobs": True}
    else:
        body = (
            common
            | sampling
            | {"prompt": prompt, "max_tokens": tokens, "stop": [":\n\n"], "stream_options": {"include_usage": True}}
        )
    return request(path, body)


async def stream(url: str, data: bytes, ending: str, events: int, statuses: Counter[int]) -> None:
    """A client of a stream, and what becomes of it."""
    async with connected(url, receive_buffer=SMALL_BUFFER if ending == SLOWLY else None) as connection:
        await connection.send(data)
        if ending == AT_ONCE:
            return
        status, headers = await connection.head()
        statuses[status] += 1
        if status == 200 and ending == SLOWLY:
            for _ in range(30):
                await asyncio.sleep(0.02)
                assert await connection.reader.read(1)
            return
        received = []
        async for piece in connection.pieces(headers):
            received.append(piece)
            if ending == IN_THE_MIDDLE and len(received) == events:
                return
        text = b"".join(received)
        assert status == 503 or (text.endswith(b"\n\ndata: [DONE]\n\n") and b'{"error"' not in text), text


async def refused(url: str, requests: Sequence[tuple[bytes, bool]], statuses: Counter[int]) -> None:
    """Sends malformed requests one after the other, over one connection as long as the server keeps it."""
    left = deque(requests)
    while left:
        async with connected(url) as connection:
            is_kept = True
            while left and is_kept:
                data, may_be_fine = left.popleft()
                await connection.send(data)
                status, headers = await connection.head()
                body = b"".join([piece async for piece in connection.pieces(headers)])
                is_kept = headers.get("connection") != "close"
                statuses[status] += 1
                assert status in range(400, 500) or status == 503 or (may_be_fine and status == 200), (data[:500], status, body)
                if status != 200:
                    is_anthropics = b" /v1/messages" in data.partition(b"\r\n")[0]
                    expected = {"message", "type"} if is_anthropics else {"message", "type", "param", "code"}
                    assert set(json.loads(body)["error"]) == expected and len(body) < 2000, body
                    assert b"Traceback" not in body and str(Path.cwd()).encode() not in body, body


async def break_off(url: str) -> None:
    """Sends what can't be answered, or only with a refusal, and hangs up."""
    for data in BREAKING_OFF * 4:
        async with connected(url) as connection:
            with contextlib.suppress(TimeoutError, ConnectionError):
                await connection.send(data)
                answer = await asyncio.wait_for(connection.reader.read(100), 0.1)
                assert not answer or answer.startswith(b"HTTP/1.1 4"), (data[:100], answer)


async def usual_seconds_beside_slow_readers(server: LiveServer) -> float:
    sampling = {"max_new_tokens": 160, "ignore_eos": True, "temperature": 0}
    many = {"return_logprob": True, "top_logprobs_num": 20, "speculative": {"enabled": False}}  # 160 events of up to 100 kB
    body = {"text": PROMPTS[0], "stream": True, "sampling_params": sampling, **many}
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(SLOW_READERS):
            connection: Connection = await stack.enter_async_context(connected(server.url, receive_buffer=SMALL_BUFFER))
            await connection.send(request(GENERATE, body))
            status, _ = await connection.head()
            assert status == 200
        await asyncio.to_thread(wait_until_idle, server, 120)
        assert gauge(server, "http_active_requests") == SLOW_READERS  # they all wait for their clients
        return await asyncio.to_thread(usual_seconds, server)


def usual_seconds(server: LiveServer) -> float:
    """What a short request takes: the best of some, as the machine may have other work."""
    return min(seconds_of_short_requests(server, 6, max_tokens=32))


def seconds_of_short_requests(server: LiveServer, count: int, max_tokens: int) -> list[float]:
    body, times = {"prompt": PROMPTS[2], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}, []
    with httpx.Client(base_url=server.url, timeout=120) as http:
        for _ in range(count):
            began = time.perf_counter()
            response = http.post(COMPLETIONS, json=body)
            times.append(time.perf_counter() - began)
            assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == max_tokens
    return times


def wait_until_closed(server: LiveServer) -> None:
    """Waits until no request is being answered: the server has noticed that the clients are gone."""
    deadline = time.monotonic() + 10
    while active := gauge(server, "http_active_requests"):
        assert time.monotonic() < deadline, f"the server still answers {active} requests whose clients are gone"
        time.sleep(0.05)


def resident_bytes(server: LiveServer) -> int:
    """Memory of the process, once no program compiles any more."""
    deadline = time.monotonic() + 300
    while (programs := httpx.get(f"{server.url}/server_info", timeout=60).json()["programs"])["ready"] < programs["total"]:
        assert time.monotonic() < deadline, programs
        time.sleep(0.2)
    [line] = [line for line in Path(f"/proc/{server.pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024
