"""What LLM("smollm2") computes, as JSON on the last line of stdout. A process of its own: other tests compile unoptimized."""

import json
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import LLM
from jaxspec.models.layers import causal_metadata


def main() -> None:
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    from lines import lines

    arrays, said = np.load(folder / "golden.npz"), json.loads((folder / "texts.json").read_text())
    with LLM("smollm2", max_running_requests=1, context_length=256, page_size=256) as llm:  # one page: few programs
        assert llm.tokenizer is not None

        def encode(text: str) -> list[int]:
            return llm.tokenizer.encode(text, add_special_tokens=False)

        @jax.jit
        def run(params, ids):  # weights that are constants of a program take minutes to compile
            model = llm.target.merge(params)
            return model.logits(model(ids, causal_metadata(*ids.shape)).hidden)

        differences, longest = [], max(len(encode(text)) for text in said["texts"])
        for number, text in enumerate(said["texts"]):
            ids = encode(text)
            assert ids == arrays[f"ids{number}"].tolist()
            padded = jnp.asarray(ids + [0] * (longest - len(ids)))[None]  # one program for all; what follows changes nothing
            logits = np.asarray(run(llm.target.params, padded))[0, : len(ids), :: said["every"]]
            differences.append(float(np.abs(logits - arrays[f"logits{number}"]).max()))
        messages = [[{"role": "user", "content": chat["question"]}] for chat in said["chats"]]
        outputs = llm.chat(messages, {"temperature": 0, "max_tokens": 100})
        found = {
            "logits differ by": max(differences),
            "prompts": [llm.encode_chat(each) for each in messages],
            "answers": [list(output.token_ids) for output in outputs],
            "first answer": outputs[0].text,
            "accept length": sum(len(each.token_ids) for each in outputs) / sum(each.speculation.verify_count for each in outputs),
            "lines": [zlib.crc32(np.array(encode(line), "<i4").tobytes()) for line in lines()],
            "lines that come back": sum(llm.tokenizer.decode(encode(line)) == line for line in lines()),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
