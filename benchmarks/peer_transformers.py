"""The `transformers` side of benchmarks.peers: reads one JSON request per line, answers with one line each.

It runs in a process of its own, maybe in another Python environment, so it imports nothing of this project.

Requests: {"op": "load", "model": DIRECTORY, "threads": N}
          {"op": "generate", "prompts": [[ids], ...], "max_tokens": N, "attention": "eager" | "sdpa", "lookup": 0 | N}
Answers:  {...result} or {"error": MESSAGE, "missing": true if a package has to be installed}
"""

import json
import sys
import time


class Transformers:
    """The model, once per attention implementation, in float32 on the CPU."""

    def __init__(self, model: str, threads: int):
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.torch = torch
        self.models = {}
        for attention in ("eager", "sdpa"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                model, dtype=torch.float32, attn_implementation=attention, local_files_only=True
            )
            self.models[attention] = loaded.eval()
            # The same number of tokens for everybody: nothing ends a text early.
            loaded.generation_config.eos_token_id = None
            loaded.generation_config.pad_token_id = 0
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}

    def generate(self, prompts: list[list[int]], max_tokens: int, attention: str, lookup: int) -> dict:
        """Greedy, one prompt after the other; `lookup` > 0: prompt lookup decoding with that many tokens."""
        options = {"prompt_lookup_num_tokens": lookup} if lookup else {}
        token_ids = []
        started = time.perf_counter()
        with self.torch.inference_mode():
            for prompt in prompts:
                ids = self.torch.tensor([prompt])
                out = self.models[attention].generate(
                    ids,
                    attention_mask=self.torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=max_tokens,
                    use_cache=True,
                    **options,
                )
                token_ids.append(out[0, len(prompt) :].tolist())
        return {"seconds": time.perf_counter() - started, "token_ids": token_ids}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # a library that prints must not garble the answers
    peer: Transformers | None = None
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        try:
            if operation == "load":
                peer = Transformers(**request)
                answer = peer.versions
            elif peer is None:
                answer = {"error": "load a model first", "missing": False}
            else:
                answer = peer.generate(**request)
        except ImportError as error:
            answer = {"error": str(error), "missing": True}
        except Exception as error:  # every failure goes to the asking process, which stops with the message
            answer = {"error": f"{type(error).__name__}: {error}", "missing": False}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
