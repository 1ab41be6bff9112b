"""How many Python calls serving takes: functions of jaxspec, in all threads. `python -m tests.engine.calls` prints them.

The host must keep up with the device, and calls are what its time consists of. Unlike seconds they can be counted anywhere. A with
block of a context manager counts as its calls, a generator as one call whenever it runs on.
"""

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import httpx

import jaxspec
from jaxspec import LLM, SamplingParams
from jaxspec.engine.driver import EngineThread
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import GenerationRequest
from jaxspec.server.app import create_app
from jaxspec.server.metrics import RequestCollector, StepTimes
from jaxspec.server.model import ServedModel
from jaxspec.testing import largest_sizes_only, random_eagle, tiny_engine, tiny_target, write_head, write_target
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.tree_shape import TreeShape
from tests.server.fakes import CHAT_TEMPLATE, byte_tokenizer

SOURCES = f"{Path(jaxspec.__file__).parent}/"
TREE = TreeShape(3, 2, 5)
SIX = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
MOST = {"a steady step": 33, "generate, six tokens": 460, "a streamed chat request of six tokens": 740}
"""They were 33, 456 and, as threads take turns, 717 on 29 November 2026."""

type Calls = Counter[str]
"""By file and function."""


class Counting:
    """Counts calls while its `with` block runs."""

    def __init__(self) -> None:
        self.calls: Calls = Counter()

    def _called(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            self.calls[f"{frame.f_code.co_filename.removeprefix(SOURCES)} {frame.f_code.co_qualname}"] += 1

    def __enter__(self) -> Calls:
        threading.setprofile_all_threads(self._called)
        return self.calls

    def __exit__(self, *_: object) -> None:
        threading.setprofile_all_threads(None)


def of_a_step() -> Calls:
    """A step of one request that emits and launches a cycle, by an engine as in `models`."""
    engine = one_layer_engine()
    engine.add(GenerationRequest(b"abd", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    with Counting() as calls:
        engine.step()
    return calls


def one_layer_engine() -> Engine:
    target = tiny_target(num_layers=1, vocab_size=256)
    return tiny_engine(TREE, target=target, head=random_eagle(target.config), tokenizer=byte_tokenizer())


def of_generate() -> Calls:
    """LLM.generate, from the call to its outputs."""
    target = tiny_target(num_layers=1, vocab_size=256)
    with tempfile.TemporaryDirectory() as directory:
        model = write_target(Path(directory) / "target", target)
        byte_tokenizer(CHAT_TEMPLATE).save_pretrained(model)
        head = write_head(Path(directory) / "head", random_eagle(target.config))
        with LLM(model, head, TREE, page_size=4, max_running_requests=2, prefill_chunk=16, progress=False) as llm:
            largest_sizes_only(llm.engine)
            for _ in range(3):
                llm.generate("abd", SIX)
            with Counting() as calls:
                llm.generate("abd", SIX)
    return calls


def of_chat() -> Calls:
    """POST /v1/chat/completions with a stream, over ASGI: from the request to its last event, without HTTP."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "abd"}], "max_tokens": 6, "temperature": 0, "stream": True}
    engine, tokenizer = one_layer_engine(), byte_tokenizer(CHAT_TEMPLATE)
    metrics, steps = RequestCollector("tiny"), StepTimes()
    thread = EngineThread(engine, [metrics, steps])
    with ChatTemplate.of_model(tokenizer) as template:
        model = ServedModel("tiny", engine.context_length, engine.tree, tokenizer, template)
        app = create_app(thread, model, metrics=metrics, steps=steps)

        async def work() -> Calls:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
                for _ in range(3):
                    await http.post("/v1/chat/completions", json=body | {"ignore_eos": True})
                with Counting() as calls:
                    response = await http.post("/v1/chat/completions", json=body | {"ignore_eos": True})
                assert response.text.endswith("data: [DONE]\n\n"), response.text
                return calls

        try:
            return asyncio.run(work())
        finally:
            thread.close()


COUNTED: dict[str, Callable[[], Calls]] = dict(zip(MOST, (of_a_step, of_generate, of_chat), strict=True))


def main() -> None:
    for name, count in COUNTED.items():
        calls = count()
        print(f"{name}: {calls.total()} calls of {len(calls)} functions, at most {MOST[name]}")
        if "-v" in sys.argv:
            print("\n".join(f"  {number:4} {function}" for function, number in calls.most_common()))


if __name__ == "__main__":
    main()
