"""CTranslate2 on the CPU, plain decoding: it has no speculation. Its converter reads the model with transformers and torch."""

import functools
import json
from pathlib import Path

from side import PLAIN, Generate, Offer, Task, serve


def load(task: Task) -> Offer:
    """The threads of one text, or one with the number of threads left to CTranslate2."""
    directory = convert(Path(task.model), Path(task.directory) / "converted")
    names = json.loads((directory / "vocabulary.json").read_text())
    return {PLAIN: {f"{threads} threads": generator(directory, names, threads) for threads in sorted({task.threads, 1})}}


def convert(model: Path, directory: Path) -> Path:
    """Writes CTranslate2's files, in float32."""
    from ctranslate2.converters import TransformersConverter
    from ctranslate2.specs.transformer_spec import TransformerDecoderModelSpec

    config = json.loads((model / "config.json").read_text())
    if head_dim := config.get("head_dim"):
        # Its converter of Llama takes heads to be hidden_size / heads wide, though its decoder knows other sizes.
        given = TransformerDecoderModelSpec.from_config
        TransformerDecoderModelSpec.from_config = functools.partial(given, head_dim=head_dim)
    TransformersConverter(str(model)).convert(str(directory), quantization="float32")
    complete_special_tokens(directory)
    return directory


def complete_special_tokens(directory: Path) -> None:
    """CTranslate2 can't load a model whose tokenizer lacks a special token. None of them is used: prompts are whole."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    first = json.loads((directory / "vocabulary.json").read_text())[0]
    for name in ("bos_token", "eos_token", "unk_token"):
        config[name] = config.get(name) or first
    file.write_text(json.dumps(config))


def generator(directory: Path, names: list[str], threads: int) -> Generate:
    """Greedy. CTranslate2 takes prompts as names of tokens, which are as good as ids."""
    import ctranslate2

    model = ctranslate2.Generator(str(directory), device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads)

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        (result,) = model.generate_batch(
            [[names[token] for token in prompt]],
            max_length=max_tokens,
            min_length=max_tokens,
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
        )
        return list(result.sequences_ids[0])

    return generate


if __name__ == "__main__":
    serve(["ctranslate2", "transformers", "torch"], load)
