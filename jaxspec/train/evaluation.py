"""Evaluates a head: its accept length in the real engine on held-out prompts, and the card that reports it."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from jaxspec.commands.workbench import count_equal, run
from jaxspec.config import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.models.registry import LoadedHead, LoadedTarget
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.conversations import Conversation
from jaxspec.tree_shape import PLAIN, TreeShape

BATCH = 4


class Trial(NamedTuple):
    """The held-out prompts of an evaluation, and the tokens to generate for each."""

    prompts: list[list[int]]
    max_tokens: int

    @classmethod
    def of(cls, heldout: Sequence[Conversation], count: int, max_tokens: int, length: int) -> "Trial":
        """The first prompts of held-out conversations that leave room for an answer. Raises ValueError if there is none."""
        prompts = [each.tokens[: each.answers[0][0]] for each in heldout]
        short = [prompt for prompt in prompts if len(prompt) + max_tokens <= length]
        if not short:
            raise ValueError(
                f"none of the {len(prompts)} held-out prompts leaves room for {max_tokens} tokens within --length {length}: "
                "train head with a larger one, or write more shards"
            )
        return cls(short[:count], max_tokens)


def accept_lengths(
    target: LoadedTarget,
    head: LoadedHead,
    tokenizer: Tokenizer | None,
    trial: Trial,
    tree: TreeShape,
    temperatures: Sequence[float] = (0.0,),
) -> list[float]:
    """Mean tokens per verification of the trial's answers, at each temperature."""
    engine, seeds = engine_for(trial, target, head, tokenizer, tree), range(len(trial.prompts))
    return [
        run(
            engine, trial.prompts, [SamplingParams(temperature=each, seed=seed, max_tokens=trial.max_tokens) for seed in seeds]
        ).accept_length
        for each in temperatures
    ]


def texts_agree(target: LoadedTarget, head: LoadedHead, tokenizer: Tokenizer | None, trial: Trial, tree: TreeShape) -> int:
    """How many greedy answers are those of plain decoding."""
    params = [SamplingParams(temperature=0, max_tokens=trial.max_tokens)] * len(trial.prompts)
    both = [
        run(engine_for(trial, target, head, tokenizer, tree), trial.prompts, params),
        run(engine_for(trial, target, None, tokenizer, PLAIN), trial.prompts, params),
    ]
    return count_equal(*(each.tokens for each in both))


def engine_for(trial: Trial, target: LoadedTarget, head: LoadedHead | None, tokenizer: Tokenizer | None, tree: TreeShape) -> Engine:
    """An engine for the trial. It pads every batch to the largest, so that cycles are compiled for no other."""
    longest = max(map(len, trial.prompts)) + trial.max_tokens
    engine = Engine(
        target, head, tokenizer, tree, EngineConfig(max_running_requests=BATCH, context_length=longest, prefix_cache=False)
    )
    engine.runner.table = replace(engine.runner.table, batches=(BATCH,))
    return engine


def curves(entry: dict[str, Any], length: float) -> dict[str, float]:
    """An evaluation as TensorBoard's curves, by their names."""
    heldout = entry["heldout"]
    found = {
        "loss/learnt": entry["train_loss"],
        "loss/held_out": heldout["loss"],
        "accept_length": length,
        "tokens_per_second": entry["tokens_per_second"],
        **{f"right_drafts/{number}": right for number, right in enumerate(heldout["accuracy"], 1)},
    }
    return {name: value for name, value in found.items() if value is not None}  # None: no step since the run was resumed


def card(name: str, facts: dict[str, Any], lengths: dict[tuple[str, float], float]) -> str:
    """A README.md for the head: how it was made, `facts` by their titles, and accept lengths by tree and temperature."""
    trees = list(dict.fromkeys(tree for tree, _ in lengths))
    temperatures = sorted({temperature for _, temperature in lengths})
    lines = [f"# A draft head for {name}", "", "| | |", "|---|---|", *(f"| {title} | {value} |" for title, value in facts.items())]
    lines += [
        "",
        "Accept length (tokens per verification, the target's own included) of answers to held-out prompts by jaxspec's engine:",
        "",
        f"| temperature | {' | '.join(trees)} |",
        f"|---|{'---|' * len(trees)}",
    ]
    for temperature in temperatures:
        cells = (f"{lengths[tree, temperature]:.2f}" for tree in trees)
        lines.append(f"| {temperature:g} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Made by `jaxspec train`, {datetime.now(UTC):%d %B %Y}.", ""])
