"""Draft heads written a second time, in NumPy, straight from checkpoint tensors: what the Flax modules are compared with.

A head is its tensors under their names in the file and a dict of settings; nothing here knows of layouts, dialects or caches.
Rows are whole sequences: row t is the pair (feature of position t, embedding of token t + 1) at position t.
"""

from typing import NamedTuple

import numpy as np

Tensors = dict[str, np.ndarray]


class Output(NamedTuple):
    """What a head hands on."""

    fed_back: np.ndarray
    logits: np.ndarray


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """x [t, heads, head_dim] turned by its position."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


def attention(tensors: Tensors, prefix: str, x: np.ndarray, settings: dict) -> np.ndarray:
    """Causal grouped-query attention."""
    head_dim, eps = settings["head_dim"], settings["rms_norm_eps"]

    def projected(name: str) -> np.ndarray:
        out = x @ tensors[f"{prefix}{name}_proj.weight"].T + tensors.get(f"{prefix}{name}_proj.bias", 0.0)
        out = out.reshape(len(x), -1, head_dim)
        return rms_norm(out, tensors[f"{prefix}{name}_norm.weight"], eps) if f"{prefix}{name}_norm.weight" in tensors else out

    q, k, v = rotate(projected("q"), settings["rope_theta"]), rotate(projected("k"), settings["rope_theta"]), projected("v")
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head_dim)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1) @ tensors[prefix + "o_proj.weight"].T


def mlp(tensors: Tensors, prefix: str, x: np.ndarray) -> np.ndarray:
    gate, up = x @ tensors[prefix + "gate_proj.weight"].T, x @ tensors[prefix + "up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ tensors[prefix + "down_proj.weight"].T


def after_attention(tensors: Tensors, prefix: str, x: np.ndarray, eps: float) -> np.ndarray:
    return x + mlp(tensors, prefix + "mlp.", rms_norm(x, tensors[prefix + "post_attention_layernorm.weight"], eps))


def later_layers(tensors: Tensors, x: np.ndarray, settings: dict) -> np.ndarray:
    """Layers 1, 2, ...: pre-norm layers whose first norm goes by either of two names."""
    index, eps = 1, settings["rms_norm_eps"]
    while f"layers.{index}.mlp.up_proj.weight" in tensors:
        prefix = f"layers.{index}."
        norm = tensors.get(prefix + "hidden_norm.weight", tensors.get(prefix + "input_layernorm.weight"))
        x = x + attention(tensors, prefix + "self_attn.", rms_norm(x, norm, eps), settings)
        x, index = after_attention(tensors, prefix, x, eps), index + 1
    return x


def eagle(tensors: Tensors, settings: dict, embeddings: np.ndarray, hidden: np.ndarray, lm_head: np.ndarray) -> Output:
    x = np.concatenate([embeddings, hidden], -1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0.0)
    x = x + attention(tensors, "layers.0.self_attn.", x, settings)
    x = later_layers(tensors, after_attention(tensors, "layers.0.", x, settings["rms_norm_eps"]), settings)
    return Output(x, x @ lm_head.T)


def eagle3_features(tensors: Tensors, settings: dict, streams: list[np.ndarray]) -> np.ndarray:
    """The projected feature."""
    eps, legacy = settings["rms_norm_eps"], ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    if settings.get("fc_norm") or settings.get("use_aux_norm"):
        names = legacy if "aux_norm_low.weight" in tensors else [f"fc_norm.{i}" for i in range(len(streams))]
        streams = [rms_norm(stream, tensors[f"{name}.weight"], eps) for stream, name in zip(streams, names, strict=True)]
    joined = np.concatenate(streams, -1)
    if settings.get("norm_before_fc"):
        joined = rms_norm(joined, tensors["input_norm.weight"], eps)
    return joined @ tensors["fc.weight"].T + tensors.get("fc.bias", 0.0)


def eagle3(tensors: Tensors, settings: dict, embeddings: np.ndarray, hidden: np.ndarray, lm_head: np.ndarray) -> Output:
    prefix, eps = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0.", settings["rms_norm_eps"]
    normed = rms_norm(hidden, tensors[prefix + "hidden_norm.weight"], eps)
    x = np.concatenate([rms_norm(embeddings, tensors[prefix + "input_layernorm.weight"], eps), normed], -1)
    residual = normed if settings.get("norm_before_residual") else hidden
    x = residual + attention(tensors, prefix + "self_attn.", x, settings)
    x = later_layers(tensors, after_attention(tensors, prefix, x, eps), settings)
    out = rms_norm(x, tensors["norm.weight"], eps)
    return Output(out if settings.get("norm_output") else x, out @ tensors.get("lm_head.weight", lm_head).T)


def mtp(tensors: Tensors, settings: dict, embeddings: np.ndarray, hidden: np.ndarray, lm_head: np.ndarray) -> Output:
    prefix, eps = "model.mtp_layers.0.", settings["rms_norm_eps"]
    embeddings = np.where(np.arange(len(embeddings))[:, None] == 0, 0.0, embeddings)
    parts = ((hidden, "hidden_layernorm"), (embeddings, "token_layernorm"))
    x = np.concatenate([rms_norm(part, tensors[f"{prefix}{name}.weight"], eps) for part, name in parts], -1)
    x = x @ tensors[prefix + "input_proj.weight"].T
    x = x + attention(tensors, prefix + "self_attn.", rms_norm(x, tensors[prefix + "input_layernorm.weight"], eps), settings)
    out = rms_norm(after_attention(tensors, prefix, x, eps), tensors[prefix + "final_layernorm.weight"], eps)
    return Output(out, out @ lm_head.T)
