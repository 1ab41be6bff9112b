"""The host side without a device: detokenizer, pages, scheduler; none of it loads JAX."""

import subprocess
import sys

import numpy as np
import pytest

from jaxspec.engine.detokenizer import Detokenizer, overlap
from jaxspec.engine.pages import PageAllocator
from jaxspec.engine.request import Request, Status
from jaxspec.engine.scheduler import Scheduler
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import TinyTokenizer


@pytest.mark.parametrize("seed", range(25))
def test_detokenizer_shows_whole_characters_and_no_stop_string(seed):
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice(list("abcé漢🙂\n"), 40))
    start = int(rng.integers(0, 38))
    stops = [text[start : start + int(rng.integers(1, 4))], "zz", text[start] + "z"]
    detokenizer, shown = Detokenizer(TinyTokenizer(), stops), ""
    for token in text.encode():
        stopped = detokenizer.add(token)
        assert detokenizer.text.startswith(shown), "text that was shown was taken back"
        shown = detokenizer.text
        assert "\N{REPLACEMENT CHARACTER}" not in shown
        if stopped:
            break
    end = min(text.index(stop) for stop in stops if stop in text)
    assert stopped and detokenizer.text == text[:end] and detokenizer.matched in stops


def test_detokenizer_gives_back_what_it_held_and_survives_invalid_bytes():
    detokenizer = Detokenizer(TinyTokenizer(), ["def f"])
    for token in b"x = 1\ndef ":
        assert not detokenizer.add(token)
    assert detokenizer.text == "x = 1\n"
    detokenizer.finish()
    assert detokenizer.text == "x = 1\ndef "
    broken = Detokenizer(TinyTokenizer())
    for token in b"a" + b"\xff" * 40 + b"b":
        broken.add(token)
    broken.finish()
    assert broken.text == "a" + "\N{REPLACEMENT CHARACTER}" * 40 + "b"


def test_detokenizer_never_shows_half_a_character_at_the_end():
    detokenizer = Detokenizer(TinyTokenizer())
    for token in "x = '漢".encode()[:-1]:
        detokenizer.add(token)
    detokenizer.finish()
    assert detokenizer.text == "x = '"


def test_overlap():
    assert [overlap(text, "\n\ndef") for text in ("x\n\n", "x\n", "x", "\n\ndef", "")] == [2, 1, 0, 0, 0]


def test_pages_are_conserved():
    rng, pages, held = np.random.default_rng(0), PageAllocator(50, 16), []
    for _ in range(2000):
        if rng.random() < 0.5 and held:
            pages.release(held.pop(int(rng.integers(len(held)))))
        elif (taken := pages.allocate(int(rng.integers(0, 12)))) is not None:
            held.append(taken)
        everything = [page for taken in held for page in taken]
        assert len(set(everything)) == len(everything) == 50 - pages.free
    for taken in held:
        pages.release(taken)
    pages.check_idle()


def test_pages_refuse_to_be_released_twice_or_lost():
    pages = PageAllocator(4, 16)
    taken = pages.allocate(3)
    assert pages.allocate(2) is None and pages.pages_for(17) == 2 and pages.pages_for(16) == 1
    with pytest.raises(RuntimeError, match=r"free \(1\) \+ held \(0\) != total \(4\)"):
        pages.check_idle()
    pages.release(taken)
    with pytest.raises(RuntimeError, match="is released twice"):
        pages.release(taken)


def request(name: str, prompt: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(name, tuple(range(prompt)), params, 0, (), Detokenizer(None))


def test_scheduler_prefills_in_chunks_in_order_of_arrival():
    scheduler = Scheduler(PageAllocator(100, 4), max_running_requests=2, prefill_chunk=8)
    a, b, c = request("a", 20, 4), request("b", 3, 4), request("c", 1, 4)
    for each in (a, b, c):
        scheduler.add(each)
    steps = [scheduler.plan() for _ in range(5)]
    chunks = [(step.prefill.request.id, step.prefill.first_slot, step.prefill.size, step.prefill.is_last) for step in steps[:4]]
    assert chunks == [("a", 0, 8, False), ("a", 8, 8, False), ("a", 16, 4, True), ("b", 0, 3, True)]
    assert steps[3].cycle == [a] and steps[4].cycle == [a, b]
    assert steps[4].prefill is None and c.status is Status.WAITING  # both rows are taken
    scheduler.finish(a)
    assert scheduler.plan().prefill.request is c


def test_scheduler_launches_no_cycle_that_cannot_emit():
    scheduler = Scheduler(PageAllocator(100, 4), max_running_requests=2, prefill_chunk=8)
    only = request("only", 3, 3)
    scheduler.add(only)
    scheduler.plan()
    only.in_flight = 1
    assert scheduler.plan().cycle == [only]
    only.in_flight = 3
    assert scheduler.plan().cycle == []


def test_configuration_requests_and_scheduler_load_no_jax():
    modules = "jaxspec, jaxspec.config, jaxspec.engine.scheduler, jaxspec.engine.request, jaxspec.engine.stats"
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
