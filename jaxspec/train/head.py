"""`jaxspec train head`: trains a draft head for a frozen target, from conversations that the target wrote.

The target runs in the same process; nothing is stored but tokens. A run can be killed at any time: it resumes from its last
checkpoint with the losses of an uninterrupted run, because batches and learning rates depend on the step number only.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tqdm import tqdm

from jaxspec.checkpoints.exporting import OWN_DIALECTS, head_checkpoint
from jaxspec.checkpoints.parameter_store import load_parameters, parameter_name
from jaxspec.checkpoints.writing import fresh_directory, tensors_of, write_checkpoint, write_tensors
from jaxspec.host_memory import available_memory
from jaxspec.models.block import BlockConfig, BlockHead
from jaxspec.models.head import DraftHead, HeadConfig
from jaxspec.models.registry import LoadedHead, LoadedTarget
from jaxspec.train.blocks import TRAINING_BLOCKS, drawn_roots, unroll_blocks
from jaxspec.train.conversations import SETTINGS, digest, fingerprint, read_shards, shard_files, write_file
from jaxspec.train.new_head import first_head
from jaxspec.train.optimizer import muon, scale_of
from jaxspec.train.rows import batch, pack, split
from jaxspec.train.settings import TrainSettings
from jaxspec.train.ttt import TRAINING, Lesson, Rows, Unrolled, accuracies, teach, unroll

CHECKPOINTS, EVALUATED = "checkpoints", "best.json"
"""In a run's folder, besides its settings and log."""
KEPT = 2
"""Checkpoints; older ones are removed."""
HELDOUT_ROWS = 32
TOKEN_MAP = "draft_to_target"
"""The one parameter that is not learnt."""


class TrainPrograms(NamedTuple):
    """The jitted functions of a run.

    params: the learnt parameters, in float32. The head runs in the target's dtype. frozen: {"target": its parameters, "head": those
    that are not learnt}.
    """

    teach: Callable
    """(frozen, rows) -> Lesson."""
    learn: Callable
    """(params, state, frozen, rows, lesson, step, scale) -> params, state, Unrolled; it uses up params and state."""
    evaluate: Callable
    """(params, frozen, rows, lesson) -> Unrolled."""

    @classmethod
    def of(cls, settings: TrainSettings, target: LoadedTarget, head: LoadedHead) -> Self:
        """Of `target` and `head`, only graphs and configs are used, not parameters."""
        optimizer = muon(settings.matrix_rate, settings.other_rate)

        def taught(frozen: dict, rows: Rows) -> Lesson:
            return teach(target.merge(frozen["target"]), head.config.captured_layers, rows)

        kernels = TRAINING_BLOCKS if isinstance(head.config, BlockConfig) else TRAINING

        def losses(params: dict, frozen: dict, rows: Rows, lesson: Lesson, step: jax.Array | int = 0) -> tuple[jax.Array, Unrolled]:
            origin = target.merge(frozen["target"])
            learnt = {**jax.tree.map(lambda array: array.astype(target.dtype), params), **frozen["head"]}
            learner = head.merge(learnt, kernels)
            if isinstance(learner, BlockHead):
                roots = drawn_roots(rows, learner.config.block_size, step, settings.seed)
                out = unroll_blocks(learner, origin, lesson, rows, roots, settings.loss)
            else:
                assert isinstance(learner, DraftHead)
                out = unroll(learner, origin, lesson, rows, settings.levels, settings.loss)
            return out.loss, out

        @jax.jit(donate_argnums=(0, 1))
        def learn(
            params: dict, state: Any, frozen: dict, rows: Rows, lesson: Lesson, step: jax.Array, scale: jax.Array
        ) -> tuple[dict, Any, Unrolled]:
            (_, out), gradient = jax.value_and_grad(losses, has_aux=True)(params, frozen, rows, lesson, step)
            updates, state = optimizer.update(gradient, state, params)
            updates = jax.tree.map(lambda update: scale * update, updates)
            return optax.apply_updates(params, updates), state, out

        return cls(jax.jit(taught), learn, jax.jit(lambda *inputs: losses(*inputs)[1]))


def room_for_lessons() -> int:
    """Bytes of the host's memory for the target's outputs: a third of what is available, 8 GiB at most."""
    return min(8 << 30, available_memory() // 3)


class Lessons:
    """The target's outputs for batches. If there is room for those of all rows, they are kept and the target runs in the first
    epoch only."""

    def __init__(self, teach: Callable[[Rows], Lesson], count: int):
        self._teach, self._count, self._room = teach, count, room_for_lessons()
        self._kept: dict[int, Lesson] = {}
        """By the row's number, in the host's memory."""

    def of(self, numbers: np.ndarray, rows: Rows) -> Lesson:
        """The lesson of `rows`, whose row numbers are `numbers`."""
        if all(number in self._kept for number in numbers):
            return jax.tree.map(lambda *parts: np.stack(parts), *(self._kept[number] for number in numbers))
        lesson = self._teach(rows)
        if sum(part.nbytes for part in lesson) // len(numbers) * self._count <= self._room:
            parts = jax.device_get(lesson)
            self._kept |= {number: Lesson(*(part[place].copy() for part in parts)) for place, number in enumerate(numbers)}
        return lesson


class Trainer:
    """One run in a folder: `settings.json`, `log.jsonl`, and checkpoints.

    Raises ValueError if the folder holds another run, the data is too small or not the target's, the batch can't be divided among
    the devices, or the target is in float16, which loses small gradients.
    """

    def __init__(self, settings: TrainSettings, target: LoadedTarget, directory: Path, data: Path, work: Path):
        self.settings, self.target, self.work = settings, target, work
        self.parts = split(read_shards(data), settings.length)
        self.rows = pack(self.parts.learnt, settings.length)
        self.heldout = jax.tree.map(lambda part: part[:HELDOUT_ROWS], pack(self.parts.heldout, settings.length))
        if len(self.rows.tokens) < settings.rows or not len(self.heldout.tokens):
            raise ValueError(
                f"{data} makes {len(self.rows.tokens)} rows to learn from and {len(self.heldout.tokens)} to evaluate on; "
                f"expected at least {settings.rows} and 1: write more with jaxspec train data"
            )
        if settings.rows % jax.device_count():
            raise ValueError(f"rows ({settings.rows}) must be a multiple of the {jax.device_count()} devices")
        if target.dtype == jnp.float16:
            raise ValueError("the target is in float16, which loses small gradients: expected bfloat16 or float32")
        largest, vocab_size = max(int(part.tokens.max()) for part in (self.rows, self.heldout)), target.config.vocab_size
        if largest >= vocab_size:
            raise ValueError(f"{data} has the token {largest}, the target {vocab_size}: the conversations are another model's")
        self.head = first_head(settings, target, directory, self.parts)
        head_checkpoint(self.head.config, OWN_DIALECTS[self.head.config.algorithm])  # raises ValueError if it can't be written
        begin = settings.begin and fingerprint(self.head)
        marks = {"data": digest(data), "shards": len(shard_files(data)), "target": fingerprint(target), "begin": begin}
        described = json.loads(json.dumps(asdict(settings) | marks))
        known = begun_run(work) or described
        if other := ", ".join(name for name in described if known.get(name) != described[name]):
            raise ValueError(f"{work} holds a run with another {other}: give another folder")
        work.mkdir(parents=True, exist_ok=True)
        write_file(work / SETTINGS, json.dumps(described, indent=2) + "\n")

        fixed = {TOKEN_MAP: self.head.params[TOKEN_MAP]} if TOKEN_MAP in self.head.params else {}
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        everywhere, self._by_row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
        learnt = {name: value for name, value in self.head.params.items() if name != TOKEN_MAP}
        learnt = jax.tree.map(lambda array: jnp.array(array, jnp.float32, copy=True), learnt)  # training donates them
        self.params = jax.device_put(learnt, everywhere)
        self.state = jax.device_put(jax.jit(muon(settings.matrix_rate, settings.other_rate).init)(self.params), everywhere)
        self.step = 0

        self._programs = TrainPrograms.of(settings, target, self.head)
        frozen = {"target": target.params, "head": fixed}
        self._fixed, self._everywhere, self._frozen = fixed, everywhere, jax.device_put(frozen, everywhere)
        self._lessons = Lessons(partial(self._programs.teach, self._frozen), len(self.rows.tokens))

    def learn(self) -> Unrolled:
        numbers = batch(len(self.rows.tokens), self.settings.rows, self.step, self.settings.seed)
        rows = self._by_devices(jax.tree.map(lambda part: part[numbers], self.rows))
        lesson = self._by_devices(self._lessons.of(numbers, rows))
        step, scale = np.int32(self.step), np.float32(scale_of(self.step, self.settings.steps))
        self.params, self.state, out = self._programs.learn(self.params, self.state, self._frozen, rows, lesson, step, scale)
        self.step += 1
        return out

    def evaluate(self) -> dict[str, Any]:
        """Loss and accuracies on held-out conversations."""
        size, held = self.settings.rows, len(self.heldout.tokens)
        outs: list[Unrolled] = []
        for first in range(0, held, size):
            numbers = np.arange(first, first + size)
            rows = Rows(*(part[numbers % held] for part in self.heldout))
            rows = self._by_devices(rows._replace(learnt=rows.learnt & (numbers < held)[:, None]))  # each counts once
            outs.append(self._programs.evaluate(self.params, self._frozen, rows, self._programs.teach(self._frozen, rows)))
        correct, counted = (np.concatenate(parts, 1) for parts in zip(*((out.correct, out.counted) for out in outs), strict=True))
        return {"loss": round(sum(float(out.loss) for out in outs) * size / held, 4), **accuracies(correct, counted)}

    def trained(self) -> LoadedHead:
        """The head as it is now, for an engine: in the target's dtype."""
        dtype = self.target.dtype
        params = jax.tree.map(lambda array: jax.device_put(np.asarray(array, dtype), jax.devices()[0]), self.params)
        return replace(self.head, params={**params, **self._fixed}, dtype=dtype)

    def save(self) -> None:
        """A checkpoint, whole or not at all. Raises ValueError if it can't be written, as on a full disk; earlier ones stay."""
        place = self.work / CHECKPOINTS / f"{self.step:08}"
        if place.exists():
            return
        arrays = flatten_dict(jax.device_get({"params": self.params, "state": _numbered(self.state)}))
        try:
            with fresh_directory(place) as fresh:
                write_tensors(fresh, ((parameter_name(keys), array) for keys, array in arrays.items()), math.inf)
        except OSError as error:
            raise ValueError(f"the checkpoint {place} can't be written ({error.strerror}); earlier ones stay") from None
        for old in checkpoints_of(self.work)[:-KEPT]:
            shutil.rmtree(old)

    def resume(self) -> bool:
        """Resumes from the newest checkpoint that can be read. Returns False if there is none."""
        shapes = {"params": self.params, "state": _numbered(self.state)}
        for place in reversed(checkpoints_of(self.work)):
            try:
                saved = load_parameters(place, shapes)
            except ValueError as error:
                aside = place.with_suffix(".unread")
                tqdm.write(f"{place} is put aside as {aside.name}: {error}")
                shutil.rmtree(aside, ignore_errors=True)
                place.rename(aside)
                continue
            saved = jax.tree.map(lambda array: jnp.array(array, copy=True), saved)  # training donates them, and files are mapped
            self.params = jax.device_put(saved["params"], self._everywhere)
            leaves = [saved["state"][str(number)] for number in range(len(saved["state"]))]
            self.state = jax.device_put(jax.tree.unflatten(jax.tree.structure(self.state), leaves), self._everywhere)
            self.step = int(place.name)
            return True
        return False

    @property
    def best(self) -> Path:
        """The head with the best accept length so far."""
        return self.work / "best"

    def keep_best(self, step: int, length: float) -> None:
        """Ends an evaluation: exports the current head if its accept length is the best so far."""
        file = self.work / EVALUATED
        best = json.loads(file.read_text()) if file.exists() and self.best.exists() else {"accept_length": 0.0}
        if length > best["accept_length"]:
            self.export(self.best)
            best = {"step": step, "accept_length": length}
        write_file(file, json.dumps(best | {"evaluated": step}) + "\n")

    def write_best(self, out: Path, text: str) -> None:
        """The best head as a new directory, with its card."""
        with fresh_directory(out, replace=False) as fresh:
            shutil.copytree(self.best, fresh, dirs_exist_ok=True)
            (fresh / "README.md").write_text(text)

    def describe_data(self) -> str:
        """The amount of data, in one line."""
        learnt = sum(end - start for each in self.parts.learnt for start, end in each.learnt())
        return (
            f"{len(self.parts.learnt)} conversations with {learnt:,} tokens to learn from in {len(self.rows.tokens)} rows, "
            f"{len(self.parts.heldout)} held out"
        )

    def export(self, directory: Path) -> None:
        """Writes the head as a checkpoint in 16 bits, in the dialect of its kind."""
        made = head_checkpoint(self.head.config, OWN_DIALECTS[self.head.config.algorithm])
        tensors = tensors_of(made.layout, self.trained().params)
        write_checkpoint(directory, made.config, tensors, dtype=jnp.bfloat16, one_file=made.one_file)

    def run(self, save_seconds: float = 300.0) -> Iterator[dict[str, Any]]:
        """Trains to the end; yields an entry of the log after every evaluation.

        Raises ValueError if the loss becomes infinite or NaN. Earlier checkpoints stay.
        """
        saved = started = time.monotonic()
        first, file = self.step, self.work / EVALUATED
        # A run that was killed during an evaluation starts by repeating it.
        evaluated = json.loads(file.read_text()).get("evaluated", 0) if file.exists() else 0
        recent: list[float] = []
        bar = tqdm(total=self.settings.steps, initial=self.step, mininterval=5, desc="training", unit="step")
        with bar, (self.work / "log.jsonl").open("a") as log:
            while True:
                is_due = self.step > evaluated and (self.step % self.settings.eval_every == 0 or self.step == self.settings.steps)
                if is_due or time.monotonic() - saved > save_seconds:
                    self.save()
                    saved = time.monotonic()
                if is_due:
                    evaluated, seconds = self.step, time.monotonic() - started
                    pace = seconds / (self.step - first) if self.step > first else 0.0
                    entry = {
                        "step": self.step,
                        "train_loss": round(float(np.mean(recent[-50:])), 4) if recent else None,
                        "heldout": self.evaluate(),
                        "tokens_per_second": round(self.settings.rows * self.settings.length / pace, 1) if pace else None,
                        "seconds_left": round(pace * (self.settings.steps - self.step)) if pace else None,
                    }
                    yield entry  # the caller may add to it
                    log.write(json.dumps(entry) + "\n")
                    log.flush()
                if self.step == self.settings.steps:
                    return
                recent.append(float(self.learn().loss))
                if not math.isfinite(recent[-1]):
                    last = next((place.name for place in reversed(checkpoints_of(self.work))), "none")
                    raise ValueError(f"the loss is {recent[-1]} at step {self.step} (last checkpoint: {last}): lower the rates")
                bar.update()
                bar.set_postfix(loss=f"{recent[-1]:.3f}", refresh=False)

    def _by_devices[T: tuple](self, arrays: T) -> T:
        return jax.device_put(arrays, self._by_row)


def checkpoints_of(work: Path) -> list[Path]:
    """A run's whole checkpoints, the newest last."""
    return sorted(place for place in (work / CHECKPOINTS).glob("[0-9]*") if place.name.isdecimal())


def begun_run(work: Path) -> dict[str, Any] | None:
    """The settings of the run in a folder; None if nothing of it was saved."""
    is_begun = (work / SETTINGS).exists() and (checkpoints_of(work) or (work / EVALUATED).exists())
    return json.loads((work / SETTINGS).read_text()) if is_begun else None


def describe(config: HeadConfig, params: dict) -> str:
    count = sum(array.size for array in jax.tree.leaves(params))
    return f"{config.algorithm} head, {count / 1e6:.1f} M parameters, draft vocabulary {config.draft_vocab_size or 'as the target'}"


def _numbered(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their numbers."""
    return {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(tree))}
