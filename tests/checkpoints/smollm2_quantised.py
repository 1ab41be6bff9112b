"""What quantisation costs SmolLM2, as one JSON object on the last line of stdout. A process of its own, as smollm2_checks.py.

By storage: the mean KL divergence from float32 on a text, and 1 + the share of positions where the head drafts the target's choice.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.load import LoadedModels, load_models
from jaxspec.model_config import QUANTIZATIONS
from jaxspec.models.layers import causal_metadata

LENGTH = 256


def measured(models: LoadedModels, texts: list[list[int]]) -> tuple[np.ndarray, float]:
    """Log probabilities of the target at every position, and the head's share."""
    target, head = models.target, models.head
    assert head is not None

    @jax.jit
    def run(params, ids):
        model, module = target.merge(params[0]), head.merge(params[1])
        out = model(ids, causal_metadata(*ids.shape), capture=head.config.captured_layers)
        rows, features = causal_metadata(1, ids.shape[1] - 1), module.project(out.features)[:, :-1]
        drafted = module.logits(module(module.embed(ids, model)[:, 1:], features, rows).hidden, model)
        return jax.nn.log_softmax(model.logits(out.hidden))[0], module.target_ids(jnp.argmax(drafted, -1))[0]

    found, hits = [], []
    for ids in texts:
        padded = jnp.asarray(ids + [0] * (LENGTH - len(ids)))[None]  # what follows changes nothing
        chosen, drafted = (np.asarray(each) for each in run((target.params, head.params), padded))
        found.append(chosen[: len(ids)])
        hits.append(drafted[: len(ids) - 1] == chosen[1 : len(ids)].argmax(-1))
    return np.concatenate(found), float(np.concatenate(hits).mean())


def main() -> None:
    said = json.loads((Path(sys.argv[1]) / "texts.json").read_text())
    found, exact = {}, None
    for quantization in (None, *QUANTIZATIONS):
        models = load_models("smollm2", dtype="float32", quantization=quantization)
        assert models.tokenizer is not None
        texts = [models.tokenizer.encode(text, add_special_tokens=False) for text in said["texts"]]
        texts += [chat["prompt"] + chat["answer"] for chat in said["chats"]]
        mine, share = measured(models, [ids[:LENGTH] for ids in texts])
        exact = mine if exact is None else exact
        found[str(quantization)] = {"KL": float((np.exp(exact) * (exact - mine)).sum(-1).mean()), "accept length": 1 + share}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
