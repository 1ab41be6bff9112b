"""`jaxspec chat` without a server: a model and its engine in this process."""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Generator
from dataclasses import replace
from queue import SimpleQueue

from jaxspec.commands.chat_loop import Messages, Piece, Wishes
from jaxspec.commands.common import load_arguments
from jaxspec.commands.serve_loading import sampling_defaults
from jaxspec.engine.driver import EngineThread
from jaxspec.engine.output import traced_tokens
from jaxspec.engine.request import EngineError, GenerationRequest, Update
from jaxspec.load import LoadedModels, load_models
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.prompts import ChatEncoder
from jaxspec.tree_shape import PLAIN, TreeShape, names_of

USUAL = {"temperature": 0.0}
"""The defaults, as in `jaxspec generate`, where the model's generation_config.json recommends nothing."""


class EngineSource:
    """A loaded model with an engine for one request at a time. `say` is called with a line about each slow step.

    Raises ValueError for a model without a chat template or too little memory, and ProgramError where a program can't be compiled.
    """

    def __init__(self, models: LoadedModels, say: Callable[[str], None]):
        self._models, self._say = models, say
        self._chats = ChatEncoder(models.tokenizer)
        try:
            self._chats.encode([{"role": "user", "content": "Hello"}])
        except ValueError as error:
            self._chats.close()
            raise ValueError(f"{models.name} can't chat, `jaxspec generate` completes text with it: {error}") from None
        self._defaults = USUAL | sampling_defaults(models.directory)
        self._start(models.tree)

    @classmethod
    def of(cls, options: Namespace, shape: TreeShape | None, say: Callable[[str], None]) -> "EngineSource":
        """Made from the command line's options. `shape`: the engine's tree. Raises what `load_models` raises, too."""
        say(f"loading {options.model_path} ...")
        started = time.perf_counter()
        engine = {"max_running_requests": 1, "random_seed": None, "request_trees": (PLAIN,)}
        models = load_models(tree=shape, **load_arguments(options) | engine)
        say(f"loaded in {time.perf_counter() - started:.1f} s")
        return cls(models, say)

    def _start(self, tree: TreeShape) -> None:
        """An engine with this tree and plain decoding, its programs compiled."""
        models = replace(self._models, tree=tree)
        self._say(f"compiling for {names_of(models.trees)}: up to minutes at the first time, then seconds ...")
        engine = models.engine
        seconds = engine.warm_up(progress=sys.stderr.isatty())
        self._tree, self._trees = tree, (*models.trees, PLAIN)
        self._room = models.longest
        self._thread = EngineThread(engine)
        self._say(f"ready after {seconds:.1f} s")

    def about(self) -> dict[str, str]:
        return {"model": self._models.name, "head": self._models.algorithm, "its tree": names_of(self._models.trees)}

    def prepare(self, tree: TreeShape | None) -> None:
        """Every engine has plain decoding and its own trees. For another tree, a new engine is made with the same weights."""
        tree = self._models.tree if tree is None else tree
        if tree in self._trees:
            return
        if self._models.algorithm == "NONE":
            raise ValueError("no drafts are loaded: start with --draft, and without --tree plain")
        self._thread.close()
        try:
            self._start(tree)
        except BaseException:
            self._start(self._tree)
            raise

    def answer(self, messages: Messages, wishes: Wishes) -> Generator[Piece]:
        prompt = self._chats.encode(messages)
        room = self._room - len(prompt)
        if room < 1:
            raise ValueError(f"the conversation has {len(prompt)} tokens, and {self._room - 1} fit: /clear begins a new one")
        sampling = self._defaults if wishes.temperature is None else self._defaults | {"temperature": wishes.temperature}
        params = SamplingParams(max_tokens=min(room, wishes.max_tokens or room), **sampling)
        asked = GenerationRequest(tuple(prompt), params, tree=wishes.tree, wants_trees=wishes.shows_drafts)
        inbox: SimpleQueue[Update | EngineError] = SimpleQueue()
        ticket, has_ended = self._thread.submit([asked], inbox.put), False
        try:
            ticket.admitted.result()
            while not has_ended:
                update = inbox.get()
                if isinstance(update, EngineError):
                    raise ValueError(str(update))
                has_ended = update.output is not None
                yield piece_of(update, traced=wishes.shows_drafts)
        finally:
            if not has_ended:
                self._thread.drop(ticket)

    def close(self) -> None:
        """Frees everything. May be called twice."""
        self._thread.close()
        self._chats.close()


def piece_of(update: Update, *, traced: bool) -> Piece:
    """What an update brings. Raises ValueError if the engine failed on the request."""
    if update.output is not None and update.output.error:
        raise ValueError(update.output.error)
    spans = [(token.text, token.origin) for token in traced_tokens(update)] if traced else []
    if "".join(text for text, _ in spans) != update.text:
        spans = [(update.text, "")]
    forwards = int(update.verification is not None)
    count = len(update.token_ids)
    finish = None if update.output is None else update.output.finish_reason
    return Piece(tuple(spans), count, forwards, forwards * count, finish)
