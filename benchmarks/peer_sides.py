"""The engines of benchmarks.peers: `python peer_sides.py NAME` answers requests on its standard input, one line of JSON each.

It runs in a process of its own, maybe in another Python environment, so this file imports nothing of this project.

Requests: {"op": "versions"}
          {"op": "load", "model": PATH, "precision": NAME, "threads": N, "lookups": [N, ...], "context": TOKENS}
          {"op": "generate", "precision": NAME, "contender": NAME, "way": NAME, "prompts": [[ids], ...], "max_tokens": N}
Answers:  {"versions": {PACKAGE: VERSION}}
          {"ways": {CONTENDER: [WAY, ...]}}
          {"seconds": SECONDS, "token_ids": [[ids], ...]}
          {"error": MESSAGE, "missing": true if a package has to be installed}
"""

import functools
import importlib.metadata
import json
import os
import shutil
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
    """What to load. Only weights are in fewer bits than float32's; activations are what the engine makes of them."""

    model: str
    """A Hugging Face model directory; llama.cpp's is a GGUF file in the precision."""
    precision: str
    """Of the weights: float32, bfloat16 (or other 16 bits), int8 or int4."""
    threads: int
    lookups: list[int]
    """How many tokens prompt lookup may propose: each is a way."""
    context: int
    """Tokens of the longest prompt and its completion."""
    directory: str
    """A folder for converted models in all precisions, removed when the process ends."""


Load = Callable[[Task], Offer]
"""Raises NotImplementedError if the engine has no weights in a precision."""


# The protocol


def serve(packages: Sequence[str], load: Load) -> None:
    """Answers requests until the input ends. `packages` are distributions; "a|b" means one of them."""
    answers = only_for_answers()
    offers: dict[str, Offer] = {}
    with tempfile.TemporaryDirectory() as directory:
        for line in sys.stdin:
            try:
                answer = answer_to(json.loads(line), packages, load, offers, directory)
            except (ImportError, NotImplementedError) as error:
                answer = {"error": str(error), "missing": isinstance(error, ImportError)}
            except Exception as error:  # the asking process decides what a failure means
                answer = {"error": f"{type(error).__name__}: {error}", "missing": False}
            print(json.dumps(answer), file=answers, flush=True)


def answer_to(request: dict[str, Any], packages: Sequence[str], load: Load, offers: dict[str, Offer], directory: str) -> dict:
    operation = request.pop("op")
    if operation == "versions":
        return {"versions": dict(map(version, packages)) | {"python": sys.version.split()[0]}}
    if operation == "load":
        offer = offers[request["precision"]] = load(Task(**request, directory=directory))
        return {"ways": {contender: list(ways) for contender, ways in offer.items()}}
    generate, max_tokens = offers[request["precision"]][request["contender"]][request["way"]], request["max_tokens"]
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

    if task.precision == "int4":
        raise NotImplementedError("it takes 4 bits from other packages (torchao, bitsandbytes), which are not measured")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(task.threads)
    dtype = torch.bfloat16 if task.precision == "bfloat16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(task.model, dtype=dtype, local_files_only=True).eval()
    model.generation_config.eos_token_id = None  # nothing ends a text early
    model.generation_config.pad_token_id = 0
    if task.precision == "int8":  # activations too, while it runs
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    def generator(**options: Any) -> Generate:
        def generate(prompt: list[int], max_tokens: int) -> list[int]:
            ids = torch.tensor([prompt])
            given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": max_tokens, "use_cache": True}
            with torch.inference_mode():
                return model.generate(ids, **given, **options)[0, len(prompt) :].tolist()

        return generate

    return {PLAIN: {"": generator()}, LOOKUP: {f"{n} tokens": generator(prompt_lookup_num_tokens=n) for n in task.lookups}}


# OpenVINO GenAI


def openvino(task: Task) -> Offer:
    """Both attention backends, and prompt lookup. optimum-intel exports the model once."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    exported = Path(task.directory) / "exported"
    if not exported.exists():
        import torch
        from optimum.intel import OVModelForCausalLM

        options = {"export": True, "compile": False, "load_in_8bit": False, "use_cache": True, "torch_dtype": torch.float32}
        OVModelForCausalLM.from_pretrained(task.model, **options).save_pretrained(exported)
    model = openvino_compressed(exported, task.precision)
    bits = "float16, " if task.precision == "bfloat16" else ""
    plain = {bits + backend: openvino_generator(model, task, 0, ATTENTION_BACKEND=backend) for backend in ("SDPA", "PA")}
    lookup = {f"{bits}{tokens} tokens": openvino_generator(model, task, tokens, prompt_lookup=True) for tokens in task.lookups}
    return {PLAIN: plain, LOOKUP: lookup}


def openvino_compressed(exported: Path, precision: str) -> Path:
    """The model with weights in this precision: float16 for 16 bits, for 4 bits groups of 32, as GGUF's blocks have."""
    import nncf
    import openvino

    modes = nncf.CompressWeightsMode
    compressions = {"int8": {"mode": modes.INT8_ASYM}, "int4": {"mode": modes.INT4_ASYM, "group_size": 32, "ratio": 1.0}}
    directory = exported.with_name(precision)
    shutil.copytree(exported, directory)
    model = openvino.Core().read_model(exported / "openvino_model.xml")
    if precision in compressions:
        model = nncf.compress_weights(model, **compressions[precision])
    openvino.save_model(model, directory / "openvino_model.xml", compress_to_fp16=precision == "bfloat16")
    return directory


def openvino_generator(model: Path, task: Task, lookup: int, **options: object) -> Generate:
    """A pipeline that proposes `lookup` tokens by prompt lookup."""
    import numpy
    import openvino
    import openvino_genai

    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": task.threads}
    tokenizer = openvino_genai.Tokenizer(model)  # required, but not used: prompts are token ids
    pipeline = openvino_genai.LLMPipeline(model, tokenizer, "CPU", **precision, **options)
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
    if task.precision == "int4":
        raise NotImplementedError("it has 4 bits (AWQ) on GPUs only")
    model, directory = Path(task.model), Path(task.directory) / task.precision
    from ctranslate2.converters import TransformersConverter
    from ctranslate2.specs.transformer_spec import TransformerDecoderModelSpec

    if head_dim := json.loads((model / "config.json").read_text()).get("head_dim"):
        # The converter of Llama assumes heads of hidden_size / heads, though the decoder supports other sizes.
        given = TransformerDecoderModelSpec.from_config
        TransformerDecoderModelSpec.from_config = functools.partial(given, head_dim=head_dim)
    TransformersConverter(str(model)).convert(str(directory), quantization=task.precision)
    names = json.loads((directory / "vocabulary.json").read_text())
    # CTranslate2 does not load a model whose tokenizer lacks a special token. None is used here.
    config = json.loads((directory / "config.json").read_text())
    special = {name: config.get(name) or names[0] for name in ("bos_token", "eos_token", "unk_token")}
    (directory / "config.json").write_text(json.dumps(config | special))
    threads = sorted({task.threads, 1})
    return {PLAIN: {f"{count} threads": ctranslate2_generator(directory, task.precision, names, count) for count in threads}}


def ctranslate2_generator(directory: Path, precision: str, names: list[str], threads: int) -> Generate:
    """Takes prompts as names of tokens, which are as good as ids."""
    import ctranslate2

    model = ctranslate2.Generator(str(directory), device="cpu", compute_type=precision, inter_threads=1, intra_threads=threads)

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

    kinds, ways = xllamacpp.common_speculative_type, {}
    modes = {"simple": kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE, "map_k": kinds.COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K}
    for tokens in task.lookups:
        for name, kind in modes.items():
            params = llama_cpp_parameters(task)
            params.speculative.types = [kind]
            sizes = getattr(params.speculative, f"ngram_{name}")
            sizes.size_n, sizes.size_m = NGRAM, tokens
            ways[f"{name}, {tokens} tokens"] = llama_cpp_generator(params)
    return {PLAIN: {"": llama_cpp_generator(llama_cpp_parameters(task))}, LOOKUP: ways}


def llama_cpp_parameters(task: Task) -> Any:
    """One request at a time, keys and values in float32, on a free port."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = task.model
    params.n_ctx, params.n_parallel, params.port = task.context, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return params


def llama_cpp_generator(params: Any) -> Generate:
    """Asks the server over HTTP, the only interface that returns token ids. Its ignore_eos forbids tokens that end a text: one
    that has such a token differs from there on."""
    import xllamacpp

    server = xllamacpp.Server(params)

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "samplers": ["top_k"], "top_k": 1}
        body |= {"ignore_eos": True, "return_tokens": True, "cache_prompt": False}
        url, kind = server.listening_address + "/completion", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), kind)) as response:
            return json.load(response)["tokens"]

    return generate


SIDES: dict[str, tuple[Sequence[str], Load]] = {
    "transformers": (("torch", "transformers"), transformers),
    "openvino-genai": (("openvino-genai", "openvino", "optimum-intel", "nncf", "torch"), openvino),
    "ctranslate2": (("ctranslate2", "transformers", "torch"), ctranslate2),
    "llama.cpp": (("xllamacpp",), llama_cpp),
}

if __name__ == "__main__":
    serve(*SIDES[sys.argv[1]])
