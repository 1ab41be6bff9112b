"""The model of benchmarks.peers in every precision: Hugging Face directories, GGUF files, and how our engine keeps the weights."""

import json
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.gguf_file import write_directory
from jaxspec.checkpoints.gguf_tensors import INDEX, LINK
from jaxspec.checkpoints.json_files import read_config
from jaxspec.checkpoints.writing import write_checkpoint

from .peer_process import NotRun

GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""The precisions, and the types of a GGUF file's matrices. Only matrices differ: norms, activations and caches are float32."""


class Weights(NamedTuple):
    """One way in which our engine keeps a model's weights."""

    precision: str
    name: str
    """The precision, or the type of a GGUF file."""
    model: Path
    dtype: str = "auto"
    quantization: str | None = None


class GgufFile(NamedTuple):
    """A GGUF file, the type of most of its matrices, and its Hugging Face directory (jaxspec.checkpoints.gguf_file)."""

    type: str
    path: Path
    directory: Path


class Models:
    """One model in every precision. Files are written into a directory when they are first asked for."""

    def __init__(self, given: Path, directory: Path):
        self.given, self.directory = given, directory

    @cached_property
    def hugging_face(self) -> Path:
        """A directory that other engines can read: the given one, or a GGUF file's tensors in float32."""
        return self._written("float32") if self._own_file else self.given

    def ours(self, precision: str) -> Iterator[Weights]:
        """Ways in which our engine keeps the weights; the first is there for every model. Raises NotRun."""
        if precision == "float32":
            yield Weights(precision, precision, self.given, dtype=precision)
        elif precision == "bfloat16":
            yield Weights(precision, precision, self._written(precision))
        else:
            yield Weights(precision, precision, self.given, quantization=precision)
            file = self.gguf(precision)
            yield Weights(precision, file.type, file.directory)

    def gguf(self, precision: str) -> GgufFile:
        """The given file if it has this precision, or one that is written. Raises NotRun if it can't be."""
        if self._own_file and self._own_file.type.startswith(GGUF_TYPES[precision][:2]):
            return self._own_file
        kind = GGUF_TYPES[precision]
        file = GgufFile(kind, self.directory / f"{kind}.gguf", self.directory / kind)
        if not file.directory.exists():
            try:
                from gguf.quants import QuantError
            except ImportError:
                raise NotRun("its GGUF file can't be written: pip install gguf") from None
            try:
                write_gguf(self.given, file.path, kind)
                write_directory(file.path, file.directory)
            except (OSError, ValueError, QuantError) as error:
                raise NotRun(f"its GGUF file can't be written: {error}") from None
        return file

    @cached_property
    def _own_file(self) -> GgufFile | None:
        if not (self.given / INDEX).exists():
            return None
        with Checkpoint(self.given) as checkpoint:
            kinds = Counter(info.format or info.dtype.name for info in checkpoint.infos.values() if len(info.shape) == 2)
        return GgufFile(kinds.most_common(1)[0][0].upper(), self.given / LINK, self.given)

    def _written(self, dtype: str) -> Path:
        directory = self.directory / dtype
        if not directory.exists():
            with Checkpoint(self.given) as checkpoint:
                tensors = ((name, checkpoint.read(name)) for name in checkpoint.infos)
                tokenizer = tuple(self.given.glob("tokenizer*"))
                write_checkpoint(directory, read_config(self.given), tensors, dtype=dtype, copy=tokenizer)
        return directory


def write_gguf(model: Path, file: Path, kind: str) -> None:
    """Writes a small Llama with a byte-pair tokenizer as GGUF; llama.cpp's own converter is not a package.

    Matrices get this type; beside blocks of 4 bits the embedding and the output projection have 8, as published files do.
    Raises ValueError for other models.
    """
    import gguf

    config: dict[str, Any] = read_config(model)
    if config["architectures"] != ["LlamaForCausalLM"] or config.get("rope_scaling"):
        raise ValueError("only Llama models without rope scaling can be converted to GGUF here")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    # llama.cpp turns token ids back into text, so it needs their names.
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    names = {number: name for name, number in tokenizer["model"]["vocab"].items()} | special
    numbers = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([names.get(number, f"<unused {number}>") for number in numbers])
    writer.add_token_types([3 if number in special else 1 for number in numbers])  # GGUF: 1 is text, 3 a control token
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_add_bos_token(False)
    gguf_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with Checkpoint(model) as checkpoint:
        for name, info in checkpoint.infos.items():
            tensor = checkpoint.read(name).astype("float32")
            if count := heads.get(name.split(".")[-2]):  # llama.cpp rotates pairs of neighbouring rows
                rows, columns = tensor.shape
                tensor = tensor.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)
            at_ends = name.split(".")[-2] in ("embed_tokens", "lm_head")
            chosen = "F32" if len(info.shape) == 1 else "Q8_0" if kind == "Q4_0" and at_ends else kind
            stored = gguf.GGMLQuantizationType[chosen]
            gguf_name = gguf_names.get_name(name, try_suffixes=(".weight",)) or name
            writer.add_tensor(gguf_name, gguf.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
