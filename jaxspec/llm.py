"""`LLM`: what users call from Python."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from numbers import Integral
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jaxspec.checkpoints.loading import check_head, load_head, load_target, target_model_config
from jaxspec.config import PLAIN, EngineConfig, SpecConfig
from jaxspec.defaults import BUILT_IN_NAME, BUILT_IN_TARGET, default_tree, gpu_dtype, own_head
from jaxspec.engine.engine import Engine
from jaxspec.engine.program_cache import enable_compilation_cache
from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.sampling_params import SamplingParams
from jaxspec.tokenizer import Tokenizer, load_tokenizer

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

Prompt = str | Sequence[int]


class LLM:
    """A target model, its draft head and an engine.

    Args:
        model: a model directory, Hugging Face's or a converted one; None: the built-in model.
        draft: a directory or file with a draft head for it (EAGLE, EAGLE-3 or MTP, in any dialect of docs/checkpoints.md);
            None: the head that comes with the model (MiMo's MTP layer, the built-in model's head), if there is one.
        spec: the draft tree; None: 5/4/8 with an EAGLE head, 1/1/2 with MTP. SpecConfig(num_steps=0) is plain decoding.
        token_map: FR-Spec's list of the tokens worth drafting (.pt, .json, .npy or .safetensors), for heads that use the
            target's lm_head.
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, 16 bits on a GPU.
        progress: show progress bars while weights load and prompts are generated.
            (Programs compile when they are first needed; `llm.engine.warm_up(progress=True)` compiles all of them.)
        options: the fields of EngineConfig, by name.

    Raises:
        ValueError: a checkpoint or option can't be used; the message says which and what to do.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | None = None,
        spec: SpecConfig | None = None,
        *,
        token_map: str | Path | None = None,
        dtype: str = "auto",
        progress: bool = False,
        **options,
    ):
        unknown = sorted(options.keys() - {field.name for field in fields(EngineConfig)})
        if unknown:
            known = ", ".join(field.name for field in fields(EngineConfig))
            raise TypeError(f"LLM has no option {', '.join(unknown)}; options of the engine are: {known}")
        if not (spec is None or isinstance(spec, SpecConfig)):
            raise ValueError(f"spec must be a SpecConfig, such as SpecConfig(3, 1, 4); got {spec!r}")
        config = EngineConfig(**options)
        enable_compilation_cache()
        plain = spec == PLAIN
        self.model_name = BUILT_IN_NAME if model is None else Path(model).resolve().name
        directory = BUILT_IN_TARGET if model is None else Path(model)
        self.progress = progress
        where = None if plain else Path(draft) if draft is not None else own_head(directory)
        if plain and token_map is not None:
            raise ValueError("SpecConfig(num_steps=0) drafts nothing: leave out token_map")
        if where is None and spec is not None and not plain:
            raise ValueError(f"the draft tree {spec} needs a draft head, and {directory.name} comes with none: give draft")
        if plain and draft is not None:
            raise ValueError("SpecConfig(num_steps=0) drafts nothing: leave out draft")
        if where is None and token_map is not None:
            raise ValueError(f"the token map {token_map} needs a draft head to work on: give draft")
        if where is None and config.head_options:
            raise ValueError(f"{config.head_options[0]} has no use without a draft head, and there is none: give draft")
        tokens = None if token_map is None else Path(token_map)
        if where is not None:
            check_head(where, target_model_config(directory), tokens)
        self.target = load_target(directory, choose_dtype(dtype, directory), progress=progress)
        self.head = None if where is None else load_head(where, self.target, token_map=tokens, progress=progress)
        if spec is None:
            spec = default_tree(self.head.config.algorithm if self.head else None)
        self.tokenizer: Tokenizer | None = load_tokenizer(directory)
        if config.is_lossy:
            warnings.warn(
                "accept_threshold_single or accept_threshold_acc is below 1: speculation is lossy, it changes what the model says",
                stacklevel=2,
            )
        made_for = self.target.config.max_position_embeddings
        if config.context_length is not None and config.context_length > made_for:
            warnings.warn(
                f"context_length {config.context_length} is more than the {made_for} tokens that the model was made for: text "
                "beyond that may be poor",
                stacklevel=2,
            )
        self.engine = Engine(self.target, self.head, self.tokenizer, spec, config)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationOutput]:
        """Completes every prompt (text, or a list of token ids); returns the outputs in the prompts' order.

        `params` is one SamplingParams for all or a list with one each. With n > 1 a prompt has n outputs, one after the other.
        An output that the engine failed on has finish_reason "error" and says why; the others are not affected.

        Raises:
            ValueError: a prompt or its parameters can't be served; nothing has run.
        """
        requests = self._add(prompts, params)
        order = {request_id: index for index, request_id in enumerate(requests)}
        outputs: list[GenerationOutput | None] = [None] * len(order)
        with tqdm(total=len(order), desc="generating", unit="prompt", disable=not self.progress) as bar:
            for update in self._run(requests):
                if update.output:
                    outputs[order[update.request_id]] = update.output
                    bar.update()
        return [output for output in outputs if output is not None]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Update]:
        """Completes one prompt, handing out text and tokens as they come; the last update carries the whole output.

        With n > 1 the updates of all n completions come mixed: their request_id tells them apart.
        Raises ValueError at the first `next` if the prompt can't be served.
        """
        yield from self._run(self._add([prompt], params))

    def _add(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[str]:
        """Queues the prompts; returns their request ids. If one is refused, none is queued."""
        if self.engine.has_work:
            raise RuntimeError("this LLM is generating already: finish the other stream first, or use the server for many clients")
        listed = as_list(prompts)
        each = [params or SamplingParams()] * len(listed) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(listed):
            raise ValueError(f"{len(listed)} prompts but {len(each)} SamplingParams: give one for all or one each")
        ids: list[str] = []
        for index, (prompt, its_params) in enumerate(zip(listed, each, strict=True)):
            try:
                if not isinstance(its_params, SamplingParams):
                    raise ValueError(f"params must be SamplingParams, got {its_params!r:.80}")
                tokens = self.encode(prompt)
                for copy in its_params.copies():
                    ids.append(self.engine.add(tokens, copy).id)
            except BaseException as error:
                for request_id in ids:
                    self.engine.abort(request_id)
                if isinstance(error, ValueError) and len(listed) > 1:
                    raise ValueError(f"prompt {index}: {error}") from None
                raise
        return ids

    def _run(self, request_ids: list[str]) -> Iterator[Update]:
        """Steps until nothing is left; whoever stops listening early ends the requests."""
        try:
            while self.engine.has_work:
                yield from self.engine.step()
        finally:  # also after Ctrl-C in the middle of a step, from which the engine recovers
            for request_id in request_ids:
                self.engine.abort(request_id)
            while self.engine.has_work:
                self.engine.step()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises ValueError for text if the model has no tokenizer."""
        if not isinstance(prompt, str):
            if not isinstance(prompt, Iterable) or not all(isinstance(token, Integral) for token in prompt):
                raise ValueError(f"a prompt is a string or a list of token ids, got {prompt!r:.80}")
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError("this model directory has no tokenizer: give lists of token ids instead of text")
        return self.tokenizer.encode(prompt)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of prompts.

    In:  "a"  or  [1, 2]  or  ["a", [1, 2]]
    Out: ["a"], [[1, 2]], ["a", [1, 2]]
    """
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    tokens = [int(prompt) for prompt in listed if isinstance(prompt, Integral)]
    others = [prompt for prompt in listed if not isinstance(prompt, int | Integral)]
    if tokens and others:
        raise ValueError("prompts mixes token ids with prompts: give one list of token ids, or a list of prompts")
    return [tokens] if tokens else others


def choose_dtype(dtype: str, directory: Path) -> jnp.dtype:
    """The dtype for weights and cache.

    "auto" is float32 on a CPU (bfloat16 matmuls run 4-16 times slower there) and 16 bits on a GPU: float16 if the
    checkpoint is, bfloat16 otherwise.
    """
    if dtype == "auto":
        if jax.default_backend() == "cpu":
            return jnp.dtype(jnp.float32)
        dtype = gpu_dtype(target_model_config(directory).dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}; got {dtype!r}")
    return jnp.dtype(DTYPES[dtype])
