"""What a checkpoint holds, a target or which kind of draft head, told by the names of its tensors. Importing this loads no JAX."""

from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open

from jaxspec.checkpoints.json_files import INDEXES, weight_map
from jaxspec.config_json import require_size

MANIFEST = "jaxspec.json"
"""The file of a converted checkpoint (converted.py)."""
HEADS = ("EAGLE", "EAGLE3", "MTP", "DFLASH", "DSPARK")
"""The kinds of heads, HeadConfig.algorithm."""
MTP_PREFIX = "model.mtp_layers."
MARKOV = "markov_head.markov_w"
"""DSpark's two matrices of biases, 1 and 2."""


def is_mtp_tensor(name: str) -> bool:
    return name.startswith(MTP_PREFIX)


def is_target(names: Collection[str]) -> bool:
    """True if the tensors are those of a whole model."""
    return "model.embed_tokens.weight" in names and "model.norm.weight" in names


def algorithm_of(names: Collection[str]) -> str | None:
    """Which kind of draft head the tensors are, as HeadConfig.algorithm says it; None: there is none."""
    has_input_norm = "layers.0.input_layernorm.weight" in names
    if "midlayer.hidden_norm.weight" in names or "layers.0.hidden_norm.weight" in names:
        return "EAGLE3"  # its first layer norms the hidden
    if "fc.weight" in names and "layers.0.post_attention_layernorm.weight" in names and not has_input_norm:
        return "EAGLE"
    if "fc.weight" in names and "hidden_norm.weight" in names and has_input_norm:  # its hidden_norm is of the projected features
        return "DSPARK" if f"{MARKOV}1.weight" in names else "DFLASH"
    return "MTP" if any(map(is_mtp_tensor, names)) else None


def usual_tensors(config: dict) -> Collection[str]:
    """The tensors that heads with this config usually have, to recognize the kind of head from config.json alone."""
    shared = {"lm_head.weight", "d2t", "t2d"}
    if "dflash_config" in config or any("DFlash" in name or "DSpark" in name for name in config.get("architectures") or ()):
        norms = {"hidden_norm.weight", "layers.0.input_layernorm.weight", "layers.0.self_attn.q_norm.weight"}
        return {"fc.weight", *norms} | ({f"{MARKOV}1.weight"} if config.get("markov_rank") else set())
    if "speculators_model_type" in config:
        return {"layers.0.hidden_norm.weight", "embed_tokens.weight", *shared}
    if "draft_vocab_size" in config or any("Eagle3" in name for name in config.get("architectures") or ()):
        return {"midlayer.hidden_norm.weight", "midlayer.post_attention_layernorm.weight", *shared}
    if config.get("num_nextn_predict_layers"):
        return {f"{MTP_PREFIX}0.input_proj.weight"}
    bias = {"fc.bias"} if config.get("bias", True) else set()
    return {"fc.weight", "layers.0.post_attention_layernorm.weight", "embed_tokens.weight"} | bias


def is_model_config(config: dict) -> bool:
    """Whether a config.json alone is taken for a whole model's: it has several layers, and no architecture named after EAGLE."""
    is_named = any("Eagle" in name for name in config.get("architectures") or ())
    return algorithm_of(usual_tensors(config)) == "EAGLE" and not is_named and require_size(config, "num_hidden_layers") > 1


def tensor_names(folder: Path) -> set[str] | None:
    """The names of a directory's tensors, from an index or the headers of safetensors. None: neither is there. Raises ValueError
    for a damaged file."""
    for index in INDEXES:
        if (folder / index).is_file():
            return set(weight_map(folder / index))
    names = set[str]()
    for path in (files := sorted(folder.glob("*.safetensors"))):
        try:
            with safe_open(path, "np") as file:
                names |= set(file.keys())
        except SafetensorError as error:
            raise ValueError(f"{path} can't be read: {error}") from None
    return names if files else None
