"""Trains the demo's EAGLE-3 head for a trained target by training-time test and writes a SafeAILab-style checkpoint.

Half of the text is the standard library, half the target's own continuations of it, which is what the head will draft for.

Run: python -m jaxspec.train.head --target jaxspec/demo/target --work WORK --out jaxspec/demo/eagle3
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from numpy.typing import NDArray
from tqdm import tqdm

from jaxspec.checkpoints.json_files import read_config
from jaxspec.checkpoints.layouts import SAFEAILAB, eagle3_layout
from jaxspec.checkpoints.loading import load_head, load_target
from jaxspec.checkpoints.writing import tensors_of, write_checkpoint
from jaxspec.config import ModelConfig
from jaxspec.models.eagle3 import Eagle3, Eagle3Config, default_captured_layers
from jaxspec.models.head import DraftHead
from jaxspec.models.llama import Llama
from jaxspec.models.registry import split_model
from jaxspec.train.data import batches, documents, load_tokenizer, token_stream
from jaxspec.train.optimizer import Schedule, muon
from jaxspec.train.ttt import accuracies, lesson, regenerate, unroll

DRAFT_VOCAB_SIZE = 1536
INTERMEDIATE_SIZE = 448
DEPTH, LONG_DEPTH = 5, 3  # unroll steps, fewer for long rows, whose attention is dear
TOKENS_PER_STEP = 3072
SHORT, LONG = 256, 1024
LONG_SHARE = 0.15  # of the decay steps
PROMPT = 48  # tokens of library text in front of each continuation
SAVE_SECONDS = 300


def head_config(target: dict) -> dict:
    """The head's config.json from the target's: one small layer and its own vocabulary."""
    return {
        **target,
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "intermediate_size": INTERMEDIATE_SIZE,
        "tie_word_embeddings": False,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
    }


def draft_vocabulary(stream: NDArray[np.int32], vocab_size: int) -> NDArray[np.int64]:
    """The most frequent tokens, ties to the smaller id, as ascending target ids [DRAFT_VOCAB_SIZE]."""
    counts = np.bincount(stream, minlength=vocab_size)
    return np.sort(np.lexsort((np.arange(vocab_size), -counts))[:DRAFT_VOCAB_SIZE])


def new_head(config: Eagle3Config, target: Llama, target_ids: NDArray[np.int64]) -> Eagle3:
    """A head that starts near the target: its rows of the output projection, its final norm, its high feature passed on."""
    head = Eagle3(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    size = config.target_hidden_size
    passed_on = jnp.concatenate([jnp.zeros((2 * size, size)), jnp.eye(size)])
    head.fc.kernel[...] = passed_on + 0.1 * head.fc.kernel[...]
    head.norm.weight[...] = jnp.array(target.norm.weight[...])  # a copy: training donates it
    head.lm_head.kernel[...] = target.embed_tokens[...][target_ids].T
    head.draft_to_target[...] = jnp.asarray(target_ids, jnp.int32)
    return head


def mixed(first: Iterator, second: Iterator) -> Iterator:
    """Items of both, in turns."""
    for source in cycle((first, second)):
        yield next(source)


def main() -> None:
    """Trains for --steps steps or as many as --minutes allow."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="the target's checkpoint, with its tokenizer")
    parser.add_argument("--work", type=Path, required=True, help="folder for the log and the latest checkpoint")
    parser.add_argument("--out", type=Path, help="folder of the final checkpoint (default: WORK/latest_head)")
    parser.add_argument("--steps", type=int, default=600, help="3072 tokens each")
    parser.add_argument("--minutes", type=float, default=20, help="decay early if the steps would take longer")
    parser.add_argument("--resume", type=Path, help="start from this head's weights")
    parser.add_argument("--continuations", type=int, default=1536, help="rows of the target's own text")
    parser.add_argument("--matrix-rate", type=float, default=0.01, help="Muon's peak learning rate")
    parser.add_argument("--other-rate", type=float, default=1e-3, help="AdamW's peak learning rate (lm_head, norms)")
    arguments = parser.parse_args()
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)

    target = load_target(arguments.target, jnp.float32)
    tokenizer = load_tokenizer(arguments.target)
    stream = token_stream(tokenizer, [document.text for document in documents(heldout=False)])
    heldout = token_stream(tokenizer, [document.text for document in documents(heldout=True)])
    target_ids = draft_vocabulary(stream, target.config.vocab_size)

    starts = next(batches(stream, PROMPT, arguments.continuations * PROMPT, seed=1))[:, :PROMPT]
    own_text = regenerate(target, starts, SHORT - PROMPT)
    heldout_starts = next(batches(heldout, PROMPT, 128 * PROMPT, seed=1))[:, :PROMPT]
    checks = {
        "library": next(batches(heldout, SHORT, 64 * SHORT))[:, :SHORT],
        "own_text": regenerate(target, heldout_starts, SHORT - PROMPT),
    }

    settings = head_config(read_config(arguments.target))
    config = Eagle3Config(
        layer=ModelConfig.from_hf(settings),
        target_hidden_size=target.config.hidden_size,
        captured_layers=default_captured_layers(target.config.num_layers),
        draft_vocab_size=DRAFT_VOCAB_SIZE,
    )
    if arguments.resume:
        loaded = load_head(arguments.resume, target)
    else:
        loaded = split_model(new_head(config, target.merge(target.params), target_ids), config)
    parameters = dict(loaded.params)
    token_map = parameters.pop("draft_to_target")
    print(f"{sum(array.size for array in jax.tree.leaves(parameters)):,} parameters in the head", flush=True)

    def restore(parameters) -> DraftHead:
        return loaded.merge({**parameters, "draft_to_target": token_map})

    optimizer = muon(arguments.matrix_rate, arguments.other_rate)
    state = optimizer.init(parameters)

    def unrolled(parameters, target_params, tokens, depth):
        model = target.merge(target_params)
        out = unroll(restore(parameters), model, lesson(model, token_map, tokens), depth)
        return out.loss, out.correct

    @jax.jit(donate_argnums=(0, 1), static_argnames="depth")
    def train_step(parameters, state, target_params, tokens, scale, depth):
        (loss, correct), gradient = jax.value_and_grad(unrolled, has_aux=True)(parameters, target_params, tokens, depth)
        updates, state = optimizer.update(gradient, state, parameters)
        updates = jax.tree.map(lambda update: scale * update, updates)
        return optax.apply_updates(parameters, updates), state, loss, correct.mean((1, 2))

    evaluate = jax.jit(unrolled, static_argnames="depth")

    def save(directory: Path) -> None:
        layout = eagle3_layout(config, SAFEAILAB, has_token_map=True, has_members=True)
        tensors = tensors_of(layout, {**parameters, "draft_to_target": token_map})
        write_checkpoint(directory, settings, tensors, dtype=jnp.bfloat16)

    def own_batches() -> Iterator[NDArray[np.int32]]:
        generator, rows = np.random.default_rng(0), TOKENS_PER_STEP // SHORT
        while True:
            yield own_text[generator.choice(len(own_text), rows, replace=False)]

    library = {length: (rows[:, :-1] for rows in batches(stream, length, TOKENS_PER_STEP, seed=length)) for length in (SHORT, LONG)}
    source = {length: mixed(library[length], own_batches()) for length in (SHORT, LONG)}
    schedule = Schedule(arguments.steps, arguments.minutes)
    losses, saved, started, step = [], time.monotonic(), time.monotonic(), 0
    with tqdm(total=schedule.steps, mininterval=10) as progress, open(work / "head_log.jsonl", "a") as log:
        while step < schedule.steps:
            scale = schedule.scale(step)
            long = step >= schedule.steps - LONG_SHARE * schedule.decay_steps
            tokens = next(source[LONG if long else SHORT])
            depth = LONG_DEPTH if tokens.shape[1] == LONG else DEPTH
            parameters, state, loss, accuracy = train_step(parameters, state, target.params, tokens, np.float32(scale), depth=depth)
            if depth == DEPTH:  # the loss is a sum over steps
                losses.append(float(loss))
            step += 1
            progress.total = schedule.steps
            progress.update()
            progress.set_postfix(loss=f"{losses[-1]:.3f}", first=f"{float(accuracy[0]):.3f}", refresh=False)
            if step % 100 == 0 or step == schedule.steps:
                entry: dict[str, Any] = {
                    "step": step,
                    "minutes": round((time.monotonic() - started) / 60, 2),
                    "scale": round(scale, 4),
                }
                entry["train"] = round(float(np.mean(losses[-50:])), 4)
                for name, rows in checks.items():
                    loss, correct = evaluate(parameters, target.params, rows, depth=DEPTH)
                    first = PROMPT if name == "own_text" else 0
                    entry[name] = {"loss": round(float(loss), 4), **accuracies(correct[:, :, first:])}
                log.write(json.dumps(entry) + "\n")
                log.flush()
            if time.monotonic() - saved > SAVE_SECONDS:
                save(work / "latest_head")
                saved = time.monotonic()
    save(work / "latest_head")
    if arguments.out:
        save(arguments.out)


if __name__ == "__main__":
    main()
