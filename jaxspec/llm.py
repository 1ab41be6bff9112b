"""`LLM`: the Python API. docs/structure.md follows one call through the code."""

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from tqdm import tqdm

from jaxspec.checkpoints.hub import DEFAULTS, HubOptions, local_path
from jaxspec.checkpoints.loading import check_head, load_head, load_target, target_model_config
from jaxspec.config import DTYPES, PLAIN, EngineConfig, TreeLike, TreeShape
from jaxspec.defaults import BUILT_IN_NAME, default_tree, gpu_dtype, model_directory, own_head
from jaxspec.engine.engine import Engine
from jaxspec.engine.program_cache import enable_compilation_cache
from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.engine.runner import Start
from jaxspec.engine.shared_engine import SharedEngine, Task
from jaxspec.engine.stats import EngineStats
from jaxspec.models.registry import LoadedHead, LoadedTarget
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.text.tokenizer import Tokenizer, load_tokenizer

type Prompt = str | Sequence[int]
type Params = SamplingParams | Mapping[str, Any]
"""A mapping holds fields of SamplingParams by name."""
type Conversation = Sequence[Mapping[str, Any]]
"""Messages such as {"role": "user", "content": "Hello"}."""


class LLM:
    """A target model, its draft head and an engine.

    Any thread may call it: calls that run at the same time share the engine's steps. `with LLM() as llm:` frees the memory at
    the end, as does `close()`.

    Args:
        model: a model directory, Hugging Face's or a converted one; a GGUF file; "smollm2"; or a name on the Hub, such as
            "meta-llama/Llama-3.1-8B-Instruct", which is downloaded once. None: the built-in model.
        draft: a draft head for it (EAGLE, EAGLE-3 or MTP: docs/checkpoints.md), a directory, a file or a name on the Hub; None:
            the head that comes with the model (MiMo's MTP layer, the built-in model's and SmolLM2's heads), if there is one.
        spec: the draft tree: a TreeShape, "5/4/8" or (5, 4, 8) for steps/topk/nodes. None: 5/4/8 with an EAGLE head, 1/1/2
            with MTP, 2/1/3 for SmolLM2. TreeShape(num_steps=0) is plain decoding.
        token_map: FR-Spec's list of the tokens worth drafting (.pt, .json, .npy or .safetensors), for heads that use the
            target's lm_head.
        dtype: "float32", "bfloat16", "float16", a NumPy or JAX dtype, or "auto": float32 on a CPU, 16 bits on a GPU.
        progress: show progress bars. None: if stderr is a terminal.
        revision: branch, tag or commit of a model on the Hub.
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
        spec: TreeLike | None = None,
        *,
        token_map: str | Path | None = None,
        dtype: DTypeLike = "auto",
        progress: bool | None = None,
        revision: str | None = None,
        download_dir: str | Path | None = None,
        **options,
    ):
        unknown = sorted(options.keys() - {field.name for field in fields(EngineConfig)})
        if unknown:
            known = ", ".join(field.name for field in fields(EngineConfig))
            raise TypeError(f"LLM has no option {', '.join(unknown)}; options of the engine are: {known}")
        config = EngineConfig(**options)
        hub = HubOptions(revision, None if download_dir is None else str(download_dir))
        files = find_files(model, draft, None if spec is None else TreeShape.of(spec), token_map, config, hub)
        enable_compilation_cache()
        self.model_name = BUILT_IN_NAME if model is None else str(model)
        self.directory = files.target
        self.progress = sys.stderr.isatty() if progress is None else progress
        if files.head is not None:
            check_head(files.head, target_model_config(files.target), files.token_map)
        self.target = load_target(files.target, choose_dtype(dtype, files.target), progress=self.progress)
        self.head: LoadedHead | None = None
        if files.head is not None:
            self.head = load_head(files.head, self.target, token_map=files.token_map, progress=self.progress)
        self.tokenizer: Tokenizer | None = load_tokenizer(files.target)
        self.target = ending_with(self.target, self.tokenizer)
        _warn(config, self.target.config.max_position_embeddings)
        self.engine = Engine(
            self.target,
            self.head,
            self.tokenizer,
            files.spec or default_tree(self.head.config.algorithm if self.head else None, files.head),
            config,
            start=Start(self.progress),
        )
        self._shared = SharedEngine(self.engine)
        self._chat_template: ChatTemplate | None = None

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        tree: TreeLike | None = None,
        params: Params | Sequence[Params] | None = None,
    ) -> list[GenerationOutput]:
        """Completes every prompt (text, or a list of token ids); returns the outputs in the prompts' order.

        With n > 1 each prompt has n outputs in a row; `prompt_index` and `index` number them. If the engine fails on one, its
        finish_reason is "error"; the others are not affected.

        Args:
            sampling_params: one for all prompts, or a list with one for each. None: the defaults of SamplingParams.
            tree: the draft tree of these prompts, the engine's own or one of its request_trees; it changes speed, not text
                (but see accept_threshold_single). None: the engine chooses.
            params: the old name of sampling_params.

        Raises:
            ValueError: a prompt or its parameters can't be served; nothing has run.
            QueueFull: these are more completions than max_waiting_requests allows; nothing has run.
            TypeError: both sampling_params and params are given.
            RuntimeError: the LLM is closed, or belongs to another process.
        """
        return self._outputs(_as_list(prompts), _renamed(sampling_params, params), tree)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        tree: TreeLike | None = None,
        params: Params | Sequence[Params] | None = None,
    ) -> Iterator[Update]:
        """Like `generate`, but hands out text and tokens as they come; the last update of a completion carries its output.

        Updates of several prompts or completions arrive interleaved; `prompt_index` and `index` tell them apart. Leaving the
        loop early ends the rest. Raises at the first `next`.
        """
        for _, update in self._updates(_as_list(prompts), _renamed(sampling_params, params), tree):
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
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(list[Conversation], [messages] if is_one else list(messages))
        prompts: list[Prompt] = [self.encode_chat(each, chat_template_kwargs) for each in conversations]
        return self._outputs(prompts, sampling_params, tree)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises ValueError for text if the model has no tokenizer."""
        if not isinstance(prompt, str):
            if not isinstance(prompt, Iterable) or not all(isinstance(token, Integral) for token in prompt):
                raise ValueError(f"a prompt must be a string or a list of token ids, got {prompt!r:.80}")
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError("this model directory has no tokenizer: give lists of token ids instead of text")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"a prompt must be valid Unicode, but its character {error.start} is half of a surrogate pair"
            ) from None
        return self.tokenizer.encode(prompt)

    def encode_chat(self, messages: Conversation, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to where the reply begins. Raises ValueError as `chat`."""
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(f"a conversation must be a list of messages with role and content, got {messages!r:.80}")
        with self._shared.turn():  # one thread starts it, and none after close()
            if self._chat_template is None:
                self._chat_template = ChatTemplate.of_model(self.tokenizer)
        if self._chat_template is None or self.tokenizer is None:
            raise ValueError("the model has no chat template: use generate, with the prompt as the model expects it")
        text = self._chat_template.render(messages, chat_template_kwargs)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stats(self) -> EngineStats:
        """Totals since the start, and the current load."""
        with self._shared.turn() as engine:
            return engine.stats()

    def warm_up(self, *, progress: bool | None = None) -> float:
        """Compiles every program that requests can need and runs each once; returns the seconds it took. Without it programs
        compile at first use.

        Raises:
            ProgramError: a program can't be compiled or fails on its first run.
        """
        with self._shared.turn() as engine:
            return engine.warm_up(progress=self.progress if progress is None else progress)

    def close(self) -> None:
        """Ends what is running and frees the memory. Later calls raise RuntimeError. May be called twice."""
        if self._shared.close():
            if self._chat_template is not None:
                self._chat_template.close()
            del self.engine, self.target, self.head

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _outputs(
        self, prompts: list[Prompt], sampling_params: Params | Sequence[Params] | None, tree: TreeLike | None
    ) -> list[GenerationOutput]:
        outputs: dict[int, GenerationOutput] = {}
        with tqdm(desc="generating", unit="completion", disable=not self.progress) as bar:
            for place, update in self._updates(prompts, sampling_params, tree, bar):
                if update.output is not None:
                    outputs[place] = update.output
                    bar.update()
        return [outputs[place] for place in range(len(outputs))]

    def _updates(
        self,
        prompts: list[Prompt],
        sampling_params: Params | Sequence[Params] | None,
        tree: TreeLike | None,
        bar: tqdm | None = None,
    ) -> Iterator[tuple[int, Update]]:
        """Pairs of a completion's place among all and its update."""
        tasks: list[Task] = []
        indices: list[tuple[int, int]] = []
        for number, (prompt, given) in enumerate(zip(prompts, _one_each(sampling_params, len(prompts)), strict=True)):
            label = f"prompt {number}: " if len(prompts) > 1 else ""
            try:
                token_ids, copies = self.encode(prompt), SamplingParams.of(given).copies()
            except ValueError as error:
                raise ValueError(f"{label}{error}") from None
            tasks += [Task(token_ids, copy, label, tree) for copy in copies]
            indices += [(number, index) for index in range(len(copies))]
        inbox = self._shared.submit(tasks)
        if bar is not None:
            bar.reset(len(tasks))
        order = {request_id: place for place, request_id in enumerate(inbox.request_ids)}
        for update in self._shared.updates(inbox):
            place = order[update.request_id]
            prompt_index, index = indices[place]
            output = update.output and replace(update.output, prompt_index=prompt_index, index=index)
            yield place, replace(update, prompt_index=prompt_index, index=index, output=output)


class ModelFiles(NamedTuple):
    """The files to load."""

    target: Path
    head: Path | None
    token_map: Path | None
    spec: TreeShape | None
    """None: the head decides (defaults.default_tree)."""


def find_files(
    model: str | Path | None,
    draft: str | Path | None,
    spec: TreeShape | None,
    token_map: str | Path | None,
    config: EngineConfig,
    hub: HubOptions = DEFAULTS,
) -> ModelFiles:
    """The files behind LLM's arguments. Raises ValueError for arguments that contradict each other."""
    target = model_directory(model, hub)
    if spec == PLAIN:
        for name, given in (("token_map", token_map), ("draft", draft)):
            if given is not None:
                raise ValueError(f"TreeShape(num_steps=0) drafts nothing: leave out {name}")
    head = None if spec == PLAIN else local_path(draft, hub.newest) if draft is not None else own_head(target)
    if head is None:
        if spec is not None and spec != PLAIN:
            raise ValueError(f"the draft tree {spec} needs a draft head, and {model} comes with none: give draft")
        if token_map is not None:
            raise ValueError(f"the token map {token_map} needs a draft head to work on: give draft")
        if config.head_options:
            raise ValueError(f"{config.head_options[0]} needs a draft head, and there is none: give draft")
    return ModelFiles(target, head, None if token_map is None else local_path(token_map, hub.newest), spec)


def ending_with(target: LoadedTarget, tokenizer: Tokenizer | None) -> LoadedTarget:
    """The target, with the tokenizer's end-of-sequence token among its own: a finetuned model's configs may not name it."""
    config, token = target.config, None if tokenizer is None else tokenizer.eos_token_id
    if token is None or token in config.eos_token_ids or token >= config.vocab_size:
        return target
    return replace(target, config=replace(config, eos_token_ids=(*config.eos_token_ids, token)))


def choose_dtype(dtype: DTypeLike, directory: Path) -> jnp.dtype:
    """The dtype of weights and cache.

    "auto" is float32 on a CPU (bfloat16 matmuls run 4-16 times slower there) and 16 bits on a GPU: float16 if the
    checkpoint is, else bfloat16.
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name == "auto":
        if jax.default_backend() == "cpu":
            return jnp.dtype(jnp.float32)
        name = gpu_dtype(target_model_config(directory).dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}; got {name!r}")
    return jnp.dtype(name)


def _warn(config: EngineConfig, made_for: int) -> None:
    """Warnings about options that work, but may surprise."""
    if config.is_lossy:
        warnings.warn(
            "accept_threshold_single or accept_threshold_acc is below 1: speculation is lossy, it changes what the model says",
            stacklevel=3,
        )
    if config.context_length is not None and config.context_length > made_for:
        warnings.warn(
            f"context_length {config.context_length} is more than the {made_for} tokens that the model was made for: text "
            "beyond that may be poor",
            stacklevel=3,
        )


def _renamed(
    sampling_params: Params | Sequence[Params] | None, params: Params | Sequence[Params] | None
) -> Params | Sequence[Params] | None:
    if params is None:
        return sampling_params
    if sampling_params is not None:
        raise TypeError("sampling_params and params are the same argument: give sampling_params only")
    warnings.warn("params is now called sampling_params; the next release removes the old name", DeprecationWarning, stacklevel=3)
    return params


def _one_each(sampling_params: Params | Sequence[Params] | None, count: int) -> Sequence[Params]:
    """One for each prompt."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams | Mapping):
        return [sampling_params or SamplingParams()] * count
    each = list(sampling_params)
    if len(each) != count:
        raise ValueError(f"{count} prompts but {len(each)} SamplingParams: give one for all or one each")
    return each


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of prompts.

    In:  "a"  or  [1, 2]  or  ["a", [1, 2]]
    Out: ["a"], [[1, 2]], ["a", [1, 2]]
    """
    if isinstance(prompts, str | Mapping):  # a mapping is refused with the other wrong prompts
        return [cast(Prompt, prompts)]
    listed = list(prompts)
    tokens = [int(prompt) for prompt in listed if isinstance(prompt, Integral)]
    others = [prompt for prompt in listed if not isinstance(prompt, int | Integral)]
    if tokens and others:
        raise ValueError("prompts mixes token ids with prompts: give one list of token ids, or a list of prompts")
    return [tokens] if tokens else others
