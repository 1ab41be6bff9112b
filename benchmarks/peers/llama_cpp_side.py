"""llama.cpp on the CPU, by its server in this process (xllamacpp): plain decoding and what it calls n-gram speculation.

The model is written as a GGUF file in float32; the server's answers over HTTP are the only ones with token ids.
"""

import json
import urllib.request
from pathlib import Path
from typing import Any

from side import LOOKUP, PLAIN, Generate, Offer, Task, serve

NGRAM = 2
"""Tokens that must be found again before what followed them is proposed."""
CONTROL = 3
"""GGUF's type of a token that is no text; 1 is text."""


def load(task: Task) -> Offer:
    """A server per way; those that aren't asked wait."""
    import xllamacpp

    file = Path(task.directory) / "model.gguf"
    Writer(Path(task.model), file).write()
    kinds = xllamacpp.common_speculative_type
    ways = {}
    for tokens in task.lookups:
        simple = parameters(xllamacpp, task, file)
        simple.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        simple.speculative.ngram_simple.size_n, simple.speculative.ngram_simple.size_m = NGRAM, tokens
        mapped = parameters(xllamacpp, task, file)
        mapped.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K]
        mapped.speculative.ngram_map_k.size_n, mapped.speculative.ngram_map_k.size_m = NGRAM, tokens
        ways[f"simple, {tokens} tokens"] = generator(xllamacpp, simple)
        ways[f"map-k, {tokens} tokens"] = generator(xllamacpp, mapped)
    return {PLAIN: {"": generator(xllamacpp, parameters(xllamacpp, task, file))}, LOOKUP: ways}


def parameters(xllamacpp: Any, task: Task, file: Path) -> Any:
    """One request at a time, everything in float32, on a port that is free."""
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.port = task.context, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return params


def generator(xllamacpp: Any, params: Any) -> Generate:
    """Asks a server of these parameters."""
    server = xllamacpp.Server(params)

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        wanted = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "samplers": ["top_k"], "top_k": 1}
        rest = {"ignore_eos": True, "return_tokens": True, "cache_prompt": False}
        request = urllib.request.Request(
            server.listening_address + "/completion", json.dumps(wanted | rest).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)["tokens"]

    return generate


class Writer:
    """Writes a small Llama with a byte-pair tokenizer as a GGUF file: what llama.cpp's own converter, no package, would do."""

    def __init__(self, model: Path, file: Path):
        import gguf

        self.gguf = gguf
        self.model = model
        self.config = json.loads((model / "config.json").read_text())
        if self.config["architectures"] != ["LlamaForCausalLM"] or self.config.get("rope_scaling"):
            raise ValueError("this benchmark writes GGUF files only of Llama models without scaled rotation")
        self.file = gguf.GGUFWriter(str(file), "llama")

    def write(self) -> None:
        """The whole file."""
        self.write_sizes()
        self.write_tokenizer()
        self.write_weights()
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()

    def write_sizes(self) -> None:
        config, file = self.config, self.file
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        file.add_context_length(config["max_position_embeddings"])
        file.add_embedding_length(config["hidden_size"])
        file.add_block_count(config["num_hidden_layers"])
        file.add_feed_forward_length(config["intermediate_size"])
        file.add_head_count(config["num_attention_heads"])
        file.add_head_count_kv(config["num_key_value_heads"])
        file.add_layer_norm_rms_eps(config["rms_norm_eps"])
        file.add_rope_freq_base(config["rope_theta"])
        file.add_rope_dimension_count(head_dim)
        file.add_key_length(head_dim)
        file.add_value_length(head_dim)
        file.add_vocab_size(config["vocab_size"])

    def write_tokenizer(self) -> None:
        """llama.cpp turns token ids back into text, so it needs to know their names."""
        tokenizer = json.loads((self.model / "tokenizer.json").read_text())
        special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
        ids = {number: name for name, number in tokenizer["model"]["vocab"].items()} | special
        numbers = range(self.config["vocab_size"])
        merges = tokenizer["model"]["merges"]
        self.file.add_tokenizer_model("gpt2")
        self.file.add_tokenizer_pre("default")
        self.file.add_token_list([ids.get(number, f"<unused {number}>") for number in numbers])
        self.file.add_token_types([CONTROL if number in special else 1 for number in numbers])
        self.file.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
        self.file.add_add_bos_token(False)

    def write_weights(self) -> None:
        """Queries' and keys' rows in the order in which llama.cpp rotates them: pairs beside each other."""
        names = self.gguf.get_tensor_name_map(self.gguf.MODEL_ARCH.LLAMA, self.config["num_hidden_layers"])
        heads = {"q_proj": self.config["num_attention_heads"], "k_proj": self.config["num_key_value_heads"]}
        for shard in sorted(self.model.glob("*.safetensors")):
            for name, tensor in read_safetensors(shard).items():
                count = heads.get(name.split(".")[-2])
                if count:
                    rows, columns = tensor.shape
                    tensor = tensor.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)
                self.file.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.copy())


def read_safetensors(file: Path) -> dict[str, Any]:
    """Every tensor in float32. numpy has no bfloat16: those are the upper halves of float32's bits."""
    import numpy

    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        raw = data[start + first : start + last]
        if entry["dtype"] == "BF16":
            values = (numpy.frombuffer(raw, numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
        else:
            values = numpy.frombuffer(raw, {"F32": numpy.float32, "F16": numpy.float16}[entry["dtype"]]).astype(numpy.float32)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


if __name__ == "__main__":
    serve(["xllamacpp", "gguf"], load)
