"""How the built-in model was made: a tokenizer and a 12 M parameter Llama, trained on the standard library (demo/corpus.py).

Run: python -m jaxspec.train.target --out jaxspec/demo/target
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from jaxspec.checkpoints.exporting import hf_config
from jaxspec.checkpoints.layouts import target_layout
from jaxspec.checkpoints.writing import tensors_of, write_checkpoint
from jaxspec.config import ModelConfig
from jaxspec.demo.corpus import documents
from jaxspec.models.layers import causal_metadata
from jaxspec.models.llama import Llama
from jaxspec.models.registry import split_model
from jaxspec.train.optimizer import muon, scale_of

END_OF_TEXT = "<|endoftext|>"

# GPT-2's splitting with single digits. A run of white space keeps its last space for the word behind it, so a line break
# with its indentation is one token.
PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# The model completes code and knows no roles: what the user writes is the code so far, a system message a comment.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{- '# ' + message['content'].replace('\\n', '\\n# ') -}}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}"""
CONFIG = ModelConfig(
    vocab_size=4096,
    hidden_size=320,
    intermediate_size=864,
    num_layers=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)
TOKENS_PER_STEP = 6144
SHORT, LONG = 256, 1024
LONG_SHARE = 0.05  # of the steps: long contexts come last, because their attention is expensive
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3


def token_stream(tokenizer: Tokenizer, texts: Iterable[str]) -> NDArray[np.int32]:
    """Encodes the documents in a shuffled order, joined by end-of-text: int32 [tokens]."""
    shuffled = list(texts)
    random.Random(0).shuffle(shuffled)
    end = tokenizer.token_to_id(END_OF_TEXT)
    return np.concatenate([np.array([*encoding.ids, end], np.int32) for encoding in tokenizer.encode_batch(shuffled)])


def batches(stream: NDArray[np.int32], length: int, tokens: int, seed: int = 0) -> Iterator[NDArray[np.int32]]:
    """Endless batches of `tokens` tokens in rows of length + 1 (inputs and their next tokens), in a new order each epoch."""
    windows = (len(stream) - 1) // length
    rows = tokens // length
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(windows)
        for first in range(0, windows - rows + 1, rows):
            starts = order[first : first + rows] * length
            yield np.stack([stream[start : start + length + 1] for start in starts])


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A lossless byte-level BPE of `vocab_size` tokens; id 0 is end-of-text."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> tuple[Path, Path]:
    """Writes tokenizer.json and tokenizer_config.json to `directory`; returns both."""
    files = directory / "tokenizer.json", directory / "tokenizer_config.json"
    tokenizer.save(str(files[0]))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": LONG,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    files[1].write_text(json.dumps(settings, indent=2) + "\n")
    return files


def next_token_loss(model: Llama, tokens):
    """Mean cross-entropy in nats; tokens [b, w + 1] int32."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    hidden = model(inputs, causal_metadata(*inputs.shape)).hidden
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), labels).mean()


def main() -> None:
    """Trains tokenizer and model and writes them as a Hugging Face checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=1000, help="6144 tokens each; 1330 are one pass over the corpus")
    arguments = parser.parse_args()
    steps = arguments.steps

    texts = [document.text for document in documents(heldout=False)]
    tokenizer = train_tokenizer(texts, CONFIG.vocab_size)
    stream = token_stream(tokenizer, texts)
    heldout = token_stream(tokenizer, (document.text for document in documents(heldout=True)))
    checks = {length: next(batches(heldout, length, 2 * TOKENS_PER_STEP)) for length in (SHORT, LONG)}

    loaded = split_model(Llama(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    parameters = loaded.params
    optimizer = muon(MATRIX_RATE, OTHER_RATE)
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

    source = {length: batches(stream, length, TOKENS_PER_STEP, seed=length) for length in (SHORT, LONG)}
    losses = []
    with tqdm(total=steps, mininterval=10) as progress:
        for step in range(steps):
            length = LONG if step >= (1 - LONG_SHARE) * steps else SHORT
            scale = np.float32(scale_of(step, steps))
            parameters, state, loss = train_step(parameters, state, next(source[length]), scale)
            losses.append(float(loss))
            progress.update()
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            if (step + 1) % 50 == 0 or step + 1 == steps:
                valid = {f"valid_{length}": round(float(loss_of(parameters, rows)), 4) for length, rows in checks.items()}
                progress.write(json.dumps({"step": step + 1, "train": round(float(np.mean(losses[-50:])), 4), **valid}))
    with TemporaryDirectory() as folder:
        written = save_tokenizer(tokenizer, Path(folder))
        tensors, config = tensors_of(target_layout(CONFIG), parameters), hf_config(CONFIG) | {"bos_token_id": None}
        write_checkpoint(arguments.out, config, tensors, dtype=jnp.bfloat16, copy=written)


if __name__ == "__main__":
    main()
