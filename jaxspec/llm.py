"""`LLM`: the Python API. docs/structure.md follows one call through the code."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, NamedTuple, Self, cast

from jax.typing import DTypeLike
from tqdm import tqdm

from jaxspec.checks import is_int
from jaxspec.engine.driver import EngineThread
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import EngineClosed, EngineError, GenerationOutput, GenerationRequest, Update
from jaxspec.engine.stats import EngineStats
from jaxspec.grammar.matcher import Grammar
from jaxspec.load import load_models
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.prompts import BYTES, ChatEncoder, Conversation, Prompt, encode, is_list
from jaxspec.tree_shape import TreeLike

CLOSED = "this LLM is closed: create a new one"
BROKEN = "the engine has failed and takes no more requests: create a new LLM"

type Params = SamplingParams | Mapping[str, Any]
"""A mapping holds fields of SamplingParams by name."""
type Ask = Callable[[tuple[int, ...], SamplingParams], GenerationRequest]
"""Makes a request of a prompt's token ids and sampling parameters: it knows all other fields of the call."""


class LLM:
    """A target model, its draft head and an engine.

    Any thread may call it: calls that run at the same time share the engine's steps. `with LLM() as llm:` frees the memory at
    the end, as does `close()`.

    Args:
        model: a model directory, Hugging Face's or a converted one; a GGUF file; "smollm2"; or a name on the Hub, such as
            "meta-llama/Llama-3.1-8B-Instruct", which is downloaded once. None: the built-in model.
        draft: a draft head for it (EAGLE, EAGLE-3 or MTP) or a small model with its tokenizer (docs/checkpoints.md), a directory,
            a file or a name on the Hub; or "ngram": drafts from the text itself, without a head. None: the head that comes with
            the model (MiMo's MTP layer, the built-in model's and SmolLM2's heads), if there is one; `ngram=True` merges both.
            Without one, on a CPU: "ngram" beside plain decoding, where the text repeats.
        tree: the draft tree: a TreeShape, "5/4/8" or (5, 4, 8) for steps/topk/nodes; with `ngram` also "7/4/8/3", where the
            head drafts three levels. None: 5/4/8 with an EAGLE head, 1/1/2 with MTP, 3/1/4 for SmolLM2 and with a small model,
            7/4/8 for "ngram". TreeShape(num_steps=0) is plain decoding, but for adaptive engines and request_trees.
        token_map: FR-Spec's list of the tokens worth drafting (.pt, .json, .npy or .safetensors), for heads that use the
            target's lm_head.
        dtype: "float32", "bfloat16", "float16", a NumPy or JAX dtype, or "auto": float32 on a CPU, 16 bits on a GPU.
        quantization: "int8", "fp8" or "int4" stores matrices in so many bits while they are loaded. None: as the checkpoint has
            them; published quantised ones stay as they are.
        speculative_draft_model_quantization: the same for the head. None: as for the target, but smollm2's is
            int8 on CPUs; "none": it is not quantised.
        progress: show progress bars. None: if stderr is a terminal.
        revision: branch, tag or commit of a model on the Hub.
        speculative_draft_model_revision: the same of the draft head or small model.
        download_dir: where downloads go. None: the Hub's cache (HF_HOME).
        options: the fields of EngineConfig, by name.

    Raises:
        ValueError: a checkpoint or option can't be used, or the memory is too small; the message says which and what to do.
        ProgramError: XLA can't compile a program; only on a GPU, elsewhere programs compile when they are needed.
        TypeError: an unknown option.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | None = None,
        tree: TreeLike | None = None,
        *,
        token_map: str | Path | None = None,
        dtype: DTypeLike = "auto",
        quantization: str | None = None,
        speculative_draft_model_quantization: str | None = None,
        progress: bool | None = None,
        revision: str | None = None,
        speculative_draft_model_revision: str | None = None,
        download_dir: str | Path | None = None,
        **options,
    ):
        models = load_models(
            model, draft, tree, token_map=token_map, dtype=dtype, quantization=quantization,
            speculative_draft_model_quantization=speculative_draft_model_quantization, progress=progress, revision=revision,
            speculative_draft_model_revision=speculative_draft_model_revision, download_dir=download_dir, **options,
        )  # fmt: skip
        self.model_name, self.directory, self.progress = models.name, models.directory, models.progress
        self.target, self.head, self.tokenizer = models.target, models.head, models.tokenizer
        self.engine = models.engine
        """It belongs to its thread: read what does not change, such as its tree."""
        self._thread = EngineThread(self.engine, closed=CLOSED, broken=BROKEN)
        self._chats = ChatEncoder(self.tokenizer)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        tree: TreeLike | None = None,
    ) -> list[GenerationOutput]:
        """Completes every prompt (text, or a list of token ids); returns the outputs in the prompts' order.

        With n > 1 each prompt has n outputs in a row; `prompt_index` and `index` number them. If the engine fails on one, its
        finish_reason is "error"; the others are not affected.

        Args:
            sampling_params: one for all prompts, or a list with one for each. None: the defaults of SamplingParams.
            tree: the draft tree of these prompts, the engine's own or one of its request_trees; it changes speed, not text
                (but see accept_threshold_single). None: the engine chooses.

        Raises:
            ValueError: a prompt or its parameters can't be served; nothing has run.
            QueueFull: these are more completions than max_waiting_requests allows; nothing has run.
            RuntimeError: the LLM is closed, or belongs to another process.
        """
        return self._outputs(_as_list(prompts), sampling_params, partial(GenerationRequest, tree=tree))

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        tree: TreeLike | None = None,
    ) -> Iterator[Update]:
        """Like `generate`, but hands out text and tokens as they come; the last update of a completion carries its output.

        Updates of several prompts or completions arrive interleaved; `prompt_index` and `index` tell them apart. Leaving the
        loop early ends the rest. Raises at the first `next`.
        """
        call = self._call(_as_list(prompts), sampling_params, partial(GenerationRequest, tree=tree))
        for _, update in self._updates(call):
            yield update

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        tree: TreeLike | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[GenerationOutput]:
        """Answers one conversation or a list of them, in the model's chat template.

        In:  [{"role": "user", "content": "Why is the sky blue?"}]
        Out: [GenerationOutput(text="Because ...")]

        Args:
            tree: as for `generate`.
            chat_template_kwargs: variables of the template, such as {"enable_thinking": False}.

        Raises:
            ValueError: the model has no chat template, or it can't render a conversation.
        """
        is_one = not is_list(messages) or isinstance(next(iter(messages), None), Mapping)
        conversations = cast(list[Conversation], [messages] if is_one else list(messages))
        prompts: list[Prompt] = [self.encode_chat(each, chat_template_kwargs) for each in conversations]
        return self._outputs(prompts, sampling_params, partial(GenerationRequest, tree=tree))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises ValueError for text if the model has no tokenizer."""
        return encode(self.tokenizer, prompt)

    def encode_chat(self, messages: Conversation, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to where the reply begins. Raises ValueError as `chat`."""
        self._thread.check_open()
        return self._chats.encode(messages, chat_template_kwargs)

    def stats(self) -> EngineStats:
        """Totals since the start, and the current load."""
        return self._thread.call(Engine.stats).result()

    def warm_up(self, *, wait_for_all: bool = True, progress: bool | None = None) -> float:
        """Compiles every program that requests can need, but for those of grammars and of prompt log probabilities, and runs each
        once; returns the seconds it took. Without it programs compile at first use.

        wait_for_all=False: waits only for the largest of each kind, which serve every request, as `jaxspec serve` does on a CPU;
        smaller ones compile in the background when they are needed, and no request waits for them.

        Raises:
            ProgramError: a program can't be compiled or fails on its first run.
        """
        shown = self.progress if progress is None else progress
        with warming_up(self._thread, wait_for_all=wait_for_all, progress=shown) as seconds:
            return seconds.result()

    def close(self) -> None:
        """Ends what is running and frees the memory. Later calls raise RuntimeError. May be called twice."""
        self._thread.close()
        self._chats.close()
        for name in ("engine", "target", "head"):
            self.__dict__.pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, prompts: Sequence[Prompt], sampling_params: Params | Sequence[Params] | None, ask: Ask) -> list["Completion"]:
        """What to ask the engine for."""
        call = []
        for number, (prompt, given) in enumerate(zip(prompts, _one_each(sampling_params, len(prompts)), strict=True)):
            label = f"prompt {number}: " if len(prompts) > 1 else ""
            try:
                token_ids, copies = self.encode(prompt), SamplingParams.of(given).copies()
                constraint = copies[0].constraint
                grammar = None if constraint is None else self._thread.compile(constraint).result()
            except CancelledError:
                raise EngineClosed(CLOSED) from None
            except ValueError as error:
                raise ValueError(f"{label}{error}") from None
            call += [Completion(ask(tuple(token_ids), copy), (number, index), label, grammar) for index, copy in enumerate(copies)]
        return call

    def _outputs(
        self, prompts: Sequence[Prompt], sampling_params: Params | Sequence[Params] | None, ask: Ask
    ) -> list[GenerationOutput]:
        call = self._call(prompts, sampling_params, ask)
        outputs: dict[int, GenerationOutput] = {}
        with tqdm(desc="generating", unit="completion", total=len(call), disable=not self.progress) as bar:
            for place, update in self._updates(call):
                if update.output is not None:
                    outputs[place] = update.output
                    bar.update()
        return [outputs[place] for place in range(len(outputs))]

    def _updates(self, call: list["Completion"]) -> Iterator[tuple[int, Update]]:
        """Pairs of a completion's place among all and its update."""
        inbox: SimpleQueue[Update | EngineError] = SimpleQueue()
        ticket, unfinished = self._thread.submit([each.request for each in call], inbox.put), len(call)
        try:
            ticket.admitted.result()
            order = {request_id: place for place, request_id in enumerate(ticket.ids)}
            while unfinished:
                update = inbox.get()
                if isinstance(update, EngineError):
                    raise update
                self._thread.check_open()
                place, unfinished = order[update.request_id], unfinished - (update.output is not None)
                if call[place].place != (0, 0):
                    prompt_index, index = call[place].place
                    output = update.output and replace(update.output, prompt_index=prompt_index, index=index)
                    update = replace(update, prompt_index=prompt_index, index=index, output=output)
                yield place, update
        except ValueError as error:
            if ticket.admitted.exception() is not error:
                raise
            raise ValueError(f"{call[len(ticket.ids)].label}{error}") from None
        finally:  # also after Ctrl-C and when a stream is left early
            if unfinished:
                self._thread.drop(ticket)


class Completion(NamedTuple):
    """One completion of a call."""

    request: GenerationRequest
    place: tuple[int, int]
    """Which prompt it completes, and which of that prompt's completions it is."""
    label: str
    """How errors name its prompt, such as "prompt 3: "."""
    grammar: Grammar | None
    """Held until the engine has the request."""


@contextmanager
def warming_up(thread: EngineThread, *, wait_for_all: bool, progress: bool) -> Iterator[Future[float]]:
    """The result of Engine.warm_up. It compiles no more once this context is left, as by Ctrl-C, or the thread is closed."""
    is_left = Event()

    def check() -> None:
        thread.check_open()
        if is_left.is_set():
            raise CancelledError

    seconds = thread.call(partial(Engine.warm_up, wait_for_all=wait_for_all, progress=progress, check=check))
    try:
        yield seconds
    finally:
        is_left.set()
        seconds.cancel()


def _one_each(sampling_params: Params | Sequence[Params] | None, count: int) -> Sequence[Params]:
    if isinstance(sampling_params, str | bytes | Mapping) or not isinstance(sampling_params, Iterable):
        return [SamplingParams.of(sampling_params)] * count
    each = list(sampling_params)
    if len(each) != count:
        raise ValueError(f"{count} prompts but {len(each)} SamplingParams: give one for all or one each")
    return each


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of prompts.

    In:  "a"  or  [1, 2]  or  ["a", [1, 2]]
    Out: ["a"], [[1, 2]], ["a", [1, 2]]
    """
    if isinstance(prompts, (str, Mapping, *BYTES)) or not isinstance(prompts, Iterable):
        return [cast(Prompt, prompts)]  # all but text are refused with the other wrong prompts
    listed = list(prompts)
    tokens = [int(prompt) for prompt in listed if is_int(prompt)]
    others = [cast(Prompt, prompt) for prompt in listed if not is_int(prompt)]
    if tokens and others:
        raise ValueError("prompts mixes token ids with prompts: give one list of token ids, or a list of prompts")
    return [tokens] if tokens else others
