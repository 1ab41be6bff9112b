"""Trains the demo target, a 12 M parameter Llama, on the standard library and writes a Hugging Face checkpoint.

Run: python -m jaxspec.train.target --work WORK --out jaxspec/demo/target
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer
from tqdm import tqdm

from jaxspec.checkpoints.layouts import target_layout
from jaxspec.checkpoints.loading import load_target
from jaxspec.checkpoints.writing import tensors_of, write_checkpoint
from jaxspec.demo.corpus import documents
from jaxspec.models.layers import causal_metadata
from jaxspec.models.llama import Llama
from jaxspec.models.registry import split_model, target_config
from jaxspec.train.data import batches, save_tokenizer, token_stream, train_tokenizer
from jaxspec.train.optimizer import Schedule, muon

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 320,
    "intermediate_size": 864,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "use_cache": True,
}
TOKENS_PER_STEP = 6144
SHORT, LONG = 256, 1024
LONG_SHARE = 0.15  # of the decay steps: long contexts come last, because their attention is expensive
SAVE_SECONDS = 300


def next_token_loss(model: Llama, tokens):
    """Mean cross-entropy in nats; tokens [b, w + 1] int32."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    hidden = model(inputs, causal_metadata(*inputs.shape)).hidden
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), labels).mean()


def main() -> None:
    """Trains for --steps steps or as many as --minutes allow."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for the tokenizer, the log and the latest checkpoint")
    parser.add_argument("--out", type=Path, help="folder of the final checkpoint (default: WORK/latest)")
    parser.add_argument("--steps", type=int, default=1000, help="6144 tokens each; 1330 are one pass over the corpus")
    parser.add_argument("--minutes", type=float, default=70, help="decay early if the steps would take longer")
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="Muon's peak learning rate")
    parser.add_argument("--other-rate", type=float, default=3e-3, help="AdamW's peak learning rate (embedding, norms)")
    parser.add_argument("--resume", type=Path, help="start from this checkpoint's weights")
    parser.add_argument("--first-step", type=int, default=0, help="steps that the resumed checkpoint has seen")
    arguments = parser.parse_args()
    work, latest = arguments.work, arguments.work / "latest"

    texts = [document.text for document in documents(heldout=False)]
    if not (work / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(texts), work)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    stream = token_stream(tokenizer, texts)
    heldout = token_stream(tokenizer, (document.text for document in documents(heldout=True)))
    checks = {length: next(batches(heldout, length, 2 * TOKENS_PER_STEP)) for length in (SHORT, LONG)}

    if arguments.resume:
        loaded = load_target(arguments.resume, jnp.float32)
    else:
        config = target_config(HF_CONFIG)
        loaded = split_model(Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    parameters = loaded.params
    print(f"{len(stream):,} tokens, {sum(array.size for array in jax.tree.leaves(parameters)):,} parameters", flush=True)
    optimizer = muon(arguments.matrix_rate, arguments.other_rate)
    state = optimizer.init(parameters)

    @jax.jit
    def loss_of(parameters, tokens):
        return next_token_loss(loaded.merge(parameters), tokens)

    @jax.jit(donate_argnums=(0, 1))
    def train_step(parameters, state, tokens, scale):
        loss, gradient = jax.value_and_grad(loss_of)(parameters, tokens)
        updates, state = optimizer.update(gradient, state, parameters)
        updates = jax.tree.map(lambda update: scale * update, updates)
        return optax.apply_updates(parameters, updates), state, loss

    def save(directory: Path) -> None:
        extra = (work / "tokenizer.json", work / "tokenizer_config.json")
        tensors = tensors_of(target_layout(loaded.config), parameters)
        write_checkpoint(directory, HF_CONFIG, tensors, dtype=jnp.bfloat16, copy=extra)

    schedule = Schedule(arguments.steps, arguments.minutes, arguments.first_step)
    source = {length: batches(stream, length, TOKENS_PER_STEP, seed=length) for length in (SHORT, LONG)}
    for _ in range(arguments.first_step):
        next(source[SHORT])
    losses, saved, started, step = [], time.monotonic(), time.monotonic(), arguments.first_step
    with tqdm(total=schedule.steps, initial=step, mininterval=10) as progress, open(work / "target_log.jsonl", "a") as log:
        while step < schedule.steps:
            scale = schedule.scale(step)
            length = LONG if step >= schedule.steps - LONG_SHARE * schedule.decay_steps else SHORT
            parameters, state, loss = train_step(parameters, state, next(source[length]), np.float32(scale))
            losses.append(float(loss))
            step += 1
            progress.total = schedule.steps
            progress.update()
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            if step % 50 == 0 or step == schedule.steps:
                valid = {f"valid_{length}": round(float(loss_of(parameters, rows)), 4) for length, rows in checks.items()}
                entry = {"step": step, "minutes": round((time.monotonic() - started) / 60, 2), "scale": round(scale, 4)}
                log.write(json.dumps({**entry, "train": round(float(np.mean(losses[-50:])), 4), **valid}) + "\n")
                log.flush()
            if time.monotonic() - saved > SAVE_SECONDS:
                save(latest)
                saved = time.monotonic()
    save(latest)
    if arguments.out:
        save(arguments.out)


if __name__ == "__main__":
    main()
