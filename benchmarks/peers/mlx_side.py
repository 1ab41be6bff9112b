"""mlx-lm on the CPU, plain decoding: its speculation needs a second model."""

from pathlib import Path

from side import PLAIN, Offer, Task, serve


def load(task: Task) -> Offer:
    """MLX takes as many threads as it likes: its operations on the CPU run in a stream each."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(task.model))
    model.set_dtype(mx.float32)

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=max_tokens)]

    return {PLAIN: {"": generate}}


if __name__ == "__main__":
    serve(["mlx", "mlx-lm"], load)
