"""The training loop: what it learns from, going on after a kill, several devices, and what goes wrong."""

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.loading import load_head
from jaxspec.models.eagle import EagleConfig
from jaxspec.models.eagle3 import Eagle3Config
from jaxspec.models.mtp import MTPConfig
from jaxspec.testing import random_block, random_mtp, tiny_target, write_target
from jaxspec.train import command
from jaxspec.train.conversations import Conversation, fingerprint, read_shards
from jaxspec.train.evaluation import Trial, accept_lengths, card, curves, texts_agree
from jaxspec.train.head import Trainer, checkpoints_of, room_for_lessons
from jaxspec.train.new_head import names_of, new_head
from jaxspec.train.rows import batch, draft_vocabulary, pack, split
from jaxspec.train.settings import BLOCKS, TrainSettings
from jaxspec.tree_shape import TreeShape
from tests.sets import exhaustive

SETTINGS = TrainSettings(steps=6, rows=4, length=24, depth=2, draft_vocab_size=32, intermediate_size=16)


def conversations(count: int, seed: int = 0) -> list[Conversation]:
    """Random texts with an answer at the end, some with one before."""
    random, found = np.random.default_rng(seed), []
    for _ in range(count):
        length = int(random.integers(8, 22))
        answers = [(length // 2, length)] if length % 2 else [(2, 4), (6, length)]
        found.append(Conversation(random.integers(1, 128, length).tolist(), answers))
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with one shard."""
    folder = tmp_path_factory.mktemp("data")
    lines = "".join(json.dumps(each._asdict()) + "\n" for each in conversations(80))
    (folder / "shard-00000.jsonl").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def trainer(settings, target, data, work, directory=None):
    return Trainer(settings, target, directory, data, work)


def test_splits_keep_every_conversation_on_one_side(data):
    parts = split(read_shards(data), 24)
    assert len(parts.learnt) + len(parts.heldout) == 80 and 0 < len(parts.heldout) < 20
    again = split([*conversations(50, seed=1), *reversed(list(read_shards(data)))], 24)
    for side, larger in zip(parts, again, strict=True):
        assert all(each in larger for each in side)
    short = split([Conversation([1, 2, 3, 4, 5, 6], [(2, 3), (5, 6)]), Conversation([1, 2, 3, 4, 5], [(4, 5)])], 4)
    assert [*short.learnt, *short.heldout] == [Conversation([1, 2, 3, 4], [(2, 3)])]


def test_packing_loses_nothing():
    given = conversations(60)
    rows = pack(given, 24)
    assert len(rows.tokens) < 60
    found = []
    for tokens, segments, positions, learnt in zip(*rows, strict=True):
        for number in range(1, segments.max() + 1):
            inside = segments == number
            assert (positions[inside] == np.arange(inside.sum())).all()
            found.append((tokens[inside].tolist(), learnt[inside].tolist()))
        assert not learnt[segments == 0].any()
    expected = []
    for tokens, answers, _ in given:
        places = [any(start <= place < end for start, end in answers) and place < len(tokens) - 1 for place in range(len(tokens))]
        expected.append((tokens, places))
    assert sorted(found) == sorted(expected)


def test_all_of_a_base_models_text_is_learnt():
    chat = Conversation([1, 2, 3, 4], [(2, 4)])
    rows = pack([chat, chat._replace(is_plain=True)], 4)
    assert rows.learnt.tolist() == [[False, False, True, False], [True, True, True, False]]
    assert draft_vocabulary([chat], None, 10).tolist() == [3, 4]
    assert draft_vocabulary([chat._replace(is_plain=True)], None, 10).tolist() == [1, 2, 3, 4]


def test_every_row_once_per_epoch():
    rows = pack(conversations(60), 24)
    count = len(rows.tokens) // 4
    epochs = [
        np.concatenate([rows.tokens[batch(4 * count, 4, step, seed=3)] for step in range(first, first + count)])
        for first in (0, count)
    ]
    for epoch in epochs:
        assert len(np.unique(epoch, axis=0)) == 4 * count
    assert not (epochs[0] == epochs[1]).all()
    assert (batch(4 * count, 4, 5, seed=3) == batch(4 * count, 4, 5, seed=3)).all()


def test_the_draft_vocabulary_is_what_answers_use_most():
    given = [Conversation([9, 9, 9, 5, 5, 7, 7, 2], [(3, 8)]), Conversation([5, 3], [(1, 2)])]
    assert draft_vocabulary(given, 3, 10).tolist() == [2, 5, 7]
    assert draft_vocabulary(given, 99, 10).tolist() == list(range(10))
    rare = Conversation([4] * 97 + [6, 6, 8], [(0, 100)])
    assert draft_vocabulary([rare], None, 10).tolist() == [4, 6], "98% of the text are covered"


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "qkv_bias": True, "kv_scales": True}])
def test_a_new_head_begins_as_the_targets_last_layer(data, changes):
    target = tiny_target(**changes)
    parts, origin = split(read_shards(data), 24), target.merge(target.params)
    whole, narrow = (new_head(replace(SETTINGS, intermediate_size=size), target, None, parts) for size in (None, 16))
    last, found = origin.layers[-1], whole.merge(whole.params)
    size = target.config.hidden_size
    assert not whole.config.layer.kv_scales, "which files of heads have no place for"
    np.testing.assert_array_equal(found.self_attn.qkv_proj.kernel[...][size:], last.self_attn.qkv_proj.kernel[...])
    assert np.abs(found.self_attn.qkv_proj.kernel[...][:size]).max() < 0.2, "embeddings have small random weights"
    for own, theirs in ((found.self_attn.o_proj, last.self_attn.o_proj), (found.mlp.down_proj, last.mlp.down_proj)):
        np.testing.assert_array_equal(own.kernel[...], theirs.kernel[...])
    other = narrow.merge(narrow.params)
    np.testing.assert_array_equal(other.self_attn.o_proj.kernel[...], last.self_attn.o_proj.kernel[...])
    assert other.mlp.down_proj.kernel[...].shape == (16, size)


@pytest.mark.variants
@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", *map(exhaustive, ("eagle3.1", "eagle", "mtp", "jetspec"))])
def test_a_head_learns_and_is_written(algorithm, tmp_path, data):
    model = tiny_target(qkv_bias=algorithm == "mtp")
    head = random_mtp(model.config) if algorithm == "mtp" else None
    directory = write_target(tmp_path / "target", model, head=head)
    ids = 32 if algorithm.startswith("eagle3") else None
    sizes = {"depth": 5 if algorithm in BLOCKS else 2, "draft_vocab_size": ids}
    settings = TrainSettings(algorithm, steps=30, rows=4, length=24, other_rate=0.01, eval_every=10, **sizes)
    run = trainer(settings, model, data, tmp_path / "work", directory)
    entries = list(run.run())
    assert [entry["step"] for entry in entries] == [10, 20, 30]
    assert entries[-1]["train_loss"] < entries[0]["train_loss"]
    assert [json.loads(line) for line in (tmp_path / "work/log.jsonl").read_text().splitlines()] == entries
    run.export(tmp_path / "head")
    again = load_head(tmp_path / "head", model)
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, atol=0.01, rtol=0.01), run.trained().params, again.params)
    further = replace(settings, begin=str(tmp_path / "head"), draft_vocab_size=None)
    assert trainer(further, model, data, tmp_path / "further").evaluate()["loss"] == pytest.approx(run.evaluate()["loss"], rel=0.01)
    assert names_of(again.config)[0] == algorithm
    other = replace(further, algorithm="mtp" if algorithm == "eagle" else "eagle")
    with pytest.raises(ValueError, match=f"is of the algorithm {algorithm}, not .*: give --algorithm {algorithm}"):
        trainer(other, model, data, tmp_path / "other")


@pytest.mark.variants
@pytest.mark.parametrize("settings", [SETTINGS, exhaustive(TrainSettings("dflash", steps=6, rows=4, length=24, depth=5))])
def test_a_killed_run_goes_on_with_the_same_losses(tmp_path, target, data, settings):
    whole = trainer(settings, target, data, tmp_path / "whole")
    losses = [float(whole.learn().loss) for _ in range(6)]
    first = trainer(settings, target, data, tmp_path / "cut")
    assert not first.resume()
    begun = [float(first.learn().loss) for _ in range(3)]
    first.save()
    first.learn()  # is lost
    (tmp_path / "cut/checkpoints/00000005.unfinished").mkdir()
    second = trainer(settings, target, data, tmp_path / "cut")
    assert second.resume() and second.step == 3
    assert begun + [float(second.learn().loss) for _ in range(3)] == losses
    jax.tree.map(np.testing.assert_array_equal, second.params, whole.params)
    second.save()
    files = [file for file in (tmp_path / "cut/checkpoints/00000006").rglob("*") if file.is_file()]
    damaged = max(files, key=lambda file: file.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    third = trainer(settings, target, data, tmp_path / "cut")
    assert third.resume() and third.step == 3, "a damaged checkpoint is left out"
    assert [float(third.learn().loss) for _ in range(3)] == losses[3:]
    third.save()
    fourth = trainer(settings, target, data, tmp_path / "cut")
    assert fourth.resume() and fourth.step == 6, "and it is no hindrance to a new one"


@pytest.mark.variants
def test_a_run_that_was_killed_in_an_evaluation_begins_with_it(tmp_path, target, data):
    settings = replace(SETTINGS, steps=4, eval_every=3)

    def evaluations():
        run = trainer(settings, target, data, tmp_path / "run")
        run.resume()
        return run, run.run()

    _, entries = evaluations()
    assert next(entries)["step"] == 3
    run, entries = evaluations()
    assert (first := next(entries))["step"] == 3 and first["train_loss"] is first["seconds_left"] is None
    assert "loss/learnt" not in curves(first, 2.0) and curves(first, 2.0)["accept_length"] == 2.0
    run.keep_best(3, 2.0)
    run, entries = evaluations()
    assert next(entries)["step"] == 4
    run, entries = evaluations()
    assert next(entries)["step"] == 4, "the last one too"
    run.keep_best(4, 1.5)
    assert json.loads((tmp_path / "run/best.json").read_text()) == {"step": 3, "accept_length": 2.0, "evaluated": 4}
    _, entries = evaluations()
    assert list(entries) == []


@pytest.mark.parametrize(("available", "room"), [(3_000_000, 1_000_000), (2**50, 8 << 30)])
def test_lessons_take_a_third_of_the_available_memory_at_most(available, room, monkeypatch):
    monkeypatch.setattr("jaxspec.train.head.available_memory", lambda: available)
    assert room_for_lessons() == room


@pytest.mark.variants
def test_the_target_runs_once_per_row_if_its_outputs_fit(tmp_path, target, data, monkeypatch):
    """With the same losses as if it ran in every epoch, resumed in the middle of one or not."""
    settings = replace(SETTINGS, steps=30)
    kept = trainer(settings, target, data, tmp_path / "kept")
    epoch, taught = len(kept.rows.tokens) // settings.rows, []
    teach = kept._lessons._teach
    kept._lessons._teach = lambda rows: taught.append(rows) or teach(rows)
    losses = []
    for step in range(2 * epoch + 2):
        losses.append(float(kept.learn().loss))
        if step == epoch + 1:
            kept.save()
    left_over = len(kept.rows.tokens) % settings.rows
    assert epoch <= len(taught) <= epoch + left_over, "rows that the first epoch left over come in the second"
    resumed = trainer(settings, target, data, tmp_path / "kept")
    assert resumed.resume()
    monkeypatch.setattr("jaxspec.train.head.room_for_lessons", lambda: 0)
    runs_again = trainer(settings, target, data, tmp_path / "again")
    assert [float(runs_again.learn().loss) for _ in losses] == losses
    assert not runs_again._lessons._kept
    assert [float(resumed.learn().loss) for _ in range(epoch)] == losses[epoch + 2 :]


@pytest.mark.variants
def test_a_full_disk_loses_nothing_that_was_saved(tmp_path, target, data):
    """The limit on a file's size stands for the disk: a write fails in the middle of a checkpoint."""
    run = trainer(SETTINGS, target, data, tmp_path)
    run.learn()
    run.save()
    run.learn()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(ValueError, match=r"00000002 can't be written \(File too large.*\); earlier ones stay") as error:
            run.save()
        with pytest.raises(OSError, match=r"File too large: .*\.safetensors'") as unexported:
            run.export(tmp_path / "head")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value) + str(unexported.value)
    again = trainer(SETTINGS, target, data, tmp_path)
    assert again.resume() and again.step == 1
    again.learn()
    again.save()
    assert [place.name for place in checkpoints_of(again.work)] == ["00000001", "00000002"]


def on_four_devices(work, settings, target, data, folder) -> list[float]:
    """The numbers that a process prints, which has a trainer `run`."""
    write_target(folder / "target", target)
    program = f"""
import jax, jax.numpy as jnp
from pathlib import Path
from jaxspec.checkpoints.loading import load_target
from jaxspec.train.head import Trainer
from jaxspec.train.settings import TrainSettings
target = load_target(Path({str(folder / "target")!r}), jnp.float32)
run = Trainer({settings!r}, target, None, Path({str(data)!r}), Path({str(folder / "four")!r}))
{work}
"""
    environment = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"}
    environment["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "0"  # two steps at once would wait for each other on few cores
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return list(map(float, ended.stdout.split()))


@pytest.mark.exhaustive
def test_four_devices_have_the_losses_of_one(tmp_path, target, data):
    work = "print(jax.device_count(), *[float(run.learn().loss) for _ in range(3)], run.evaluate()['loss'])"
    devices, *losses = on_four_devices(work, SETTINGS, target, data, tmp_path)
    alone = trainer(SETTINGS, target, data, tmp_path / "one")
    assert devices == 4
    np.testing.assert_allclose(losses[:3], [float(alone.learn().loss) for _ in range(3)], atol=1e-6, rtol=1e-6)


@pytest.mark.exhaustive
def test_devices_share_the_logits_too(data, tmp_path, target):
    """Each has about a quarter of the work of one device, of which logits are most here."""
    settings = replace(SETTINGS, draft_vocab_size=128)
    work = "from tests.train.test_head import flops_of_evaluating; print(flops_of_evaluating(run))"
    [flops] = on_four_devices(work, settings, target, data, tmp_path)
    assert 0.2 < flops / flops_of_evaluating(trainer(settings, target, data, tmp_path / "one")) < 0.35


def flops_of_evaluating(run: Trainer) -> float:
    """Of one device, for a batch."""
    rows = run._by_devices(jax.tree.map(lambda part: part[:4], run.rows))
    lesson = run._programs.teach(run._frozen, rows)
    return run._programs.evaluate.lower(run.params, run._frozen, rows, lesson).compile().cost_analysis()["flops"]


@pytest.mark.variants
@pytest.mark.parametrize("rows", [1, 2])
def test_all_held_out_rows_are_evaluated_once(rows, data, tmp_path, target):
    """Whatever the size of a batch."""
    one, other = (trainer(replace(SETTINGS, rows=size), target, data, tmp_path / str(size)) for size in (rows, 4))
    assert len(one.heldout.tokens) % rows or rows == 1
    found, expected = one.evaluate(), other.evaluate()
    assert found.pop("loss") == pytest.approx(expected.pop("loss"), abs=1e-3)
    assert found == expected


def in_dtype(model, dtype):
    return replace(model, params=jax.tree.map(lambda array: array.astype(dtype), model.params), dtype=jnp.dtype(dtype))


@pytest.mark.exhaustive
def test_a_target_in_16_bits(tmp_path, target, data):
    """The head runs in the target's dtype; its parameters are kept and changed in 32 bits."""
    half = in_dtype(target, "bfloat16")
    run, exact = trainer(SETTINGS, half, data, tmp_path / "half"), trainer(SETTINGS, target, data, tmp_path / "exact")
    losses, expected = ([float(each.learn().loss) for _ in range(3)] for each in (run, exact))
    np.testing.assert_allclose(losses, expected, rtol=0.01)
    assert losses != expected and all(array.dtype == jnp.float32 for array in jax.tree.leaves(run.params))
    assert all(array.dtype in (jnp.bfloat16, jnp.int32) for array in jax.tree.leaves(run.trained().params))


def test_a_finished_evaluation_belongs_to_its_run(tmp_path, target, data):
    """Even without checkpoints, another run in its folder would be compared with it, and could export its head."""
    trainer(SETTINGS, target, data, tmp_path / "run").keep_best(3, 2.0)
    with pytest.raises(ValueError, match="holds a run with another depth, eval_prompts: give another folder"):
        trainer(replace(SETTINGS, depth=1, eval_prompts=8), target, data, tmp_path / "run")
    assert not trainer(SETTINGS, target, data, tmp_path / "run").resume()


@pytest.mark.variants
def test_what_goes_wrong_is_one_line(tmp_path, target, data):
    endless = TrainSettings(**{**vars(SETTINGS), "other_rate": 1e30, "steps": 50})
    run = trainer(endless, target, data, tmp_path / "nan")
    with pytest.raises(ValueError, match=r"the loss is nan at step \d+ \(last checkpoint: none\): lower the rates"):
        list(run.run())
    trainer(SETTINGS, target, data, tmp_path / "nan").save()  # nothing was saved before
    with pytest.raises(ValueError, match=r"holds a run with another steps, other_rate: give another folder"):
        trainer(endless, target, data, tmp_path / "nan")
    with pytest.raises(ValueError, match=r"makes \d+ rows to learn from and \d+ to evaluate on; expected at least 400 and 1"):
        trainer(TrainSettings(rows=400, length=24), target, data, tmp_path / "few")
    trainer(SETTINGS, target, data, tmp_path / "begun").save()
    more = tmp_path / "more"
    shutil.copytree(data, more)
    shutil.copy(data / "shard-00000.jsonl", more / "shard-00001.jsonl")
    with pytest.raises(ValueError, match=r"holds a run with another data, shards: give another folder"):
        trainer(SETTINGS, target, more, tmp_path / "begun")
    layers = target.params["layers"]
    changed = jax.tree.map(lambda array: array * 1.5, layers[next(iter(layers))])
    other = replace(target, params={**target.params, "layers": {**layers, next(iter(layers)): changed}})
    with pytest.raises(ValueError, match=r"holds a run with another target: give another folder"):
        trainer(SETTINGS, other, data, tmp_path / "begun")
    coarse = in_dtype(target, "bfloat16")
    again = in_dtype(coarse, "float32")
    assert fingerprint(coarse) == fingerprint(again) != fingerprint(target)
    half = in_dtype(target, "float16")
    with pytest.raises(ValueError, match="in float16, which loses small gradients: expected bfloat16 or float32"):
        trainer(SETTINGS, half, data, tmp_path / "half")
    with (more / "shard-00001.jsonl").open("a") as file:
        file.write('{"tokens": [1, 128, 3], "answers": [[1, 3]]}\n')
    with pytest.raises(ValueError, match="has the token 128, the target 128: the conversations are another model's"):
        trainer(SETTINGS, target, more, tmp_path / "other")
    with pytest.raises(ValueError, match=r"none of the \d+ held-out prompts leaves room for 64 tokens within --length 64"):
        Trial.of(run.parts.heldout, 4, 64, 64)
    with pytest.raises(ValueError, match="holds no shards: write them with jaxspec train data"):
        trainer(SETTINGS, target, tmp_path, tmp_path / "none")
    for damage in ("{", '{"tokens": [1]}', '{"tokens": [1, 2], "answers": [[1, 3]]}', '{"tokens": ["a"], "answers": []}'):
        (tmp_path / "shard-00000.jsonl").write_text('{"tokens": [1, 2, 3], "answers": [[1, 3]]}\n' + damage + "\n")
        with pytest.raises(ValueError, match=r"shard-00000.jsonl, line 2 is damaged .*: delete the file, it will be written again"):
            list(read_shards(tmp_path))
    for wrong, message in (
        ({"algorithm": "medusa"}, r"algorithm must be one of eagle3, eagle3\.1, eagle, mtp"),
        ({"loss": "l2"}, "loss must be one of cross-entropy, lk, got 'l2'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"algorithm": "eagle", "draft_vocab_size": 9}, r"draft_vocab_size is for new heads of the algorithms eagle3, eagle3\.1"),
        ({"algorithm": "mtp", "intermediate_size": 9}, "intermediate_size is for new heads"),
        ({"begin": "HEAD", "draft_vocab_size": 9}, "draft_vocab_size is for new heads"),
        ({"num_layers": 2}, "num_layers is for new heads of the algorithms dflash, jetspec: leave it out"),
        ({"algorithm": "jetspec", "depth": 4}, "depth must be at least 5 for jetspec, got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainSettings(**wrong)


def test_block_heads_that_can_not_be_trained_further(tmp_path, target, data, monkeypatch):
    begun = TrainSettings("dflash", begin="HEAD", depth=6, rows=4, length=24)
    for head, message in (
        (random_block(target.config, markov_rank=4), "HEAD is a DSPARK head, which can't be trained here"),
        (random_block(target.config), "a block of HEAD drafts 5 tokens, not 6: leave depth out"),
        (random_block(target.config, causal=(True, True)), "HEAD is of the algorithm jetspec, not dflash"),
        (random_block(target.config, predicts_next=True), "heads that predict the next token can't be written in the z-lab"),
    ):
        monkeypatch.setattr("jaxspec.train.new_head.load_head", lambda *_, head=head: head)
        with pytest.raises(ValueError, match=message):
            trainer(begun, target, data, tmp_path / "work")


def test_heads_that_could_not_be_learnt_or_written_are_not_begun_with(tmp_path, target, data, monkeypatch):
    mapped = EagleConfig(layer=target.config, target_hidden_size=target.config.hidden_size, draft_vocab_size=8)
    quantised = replace(mapped, draft_vocab_size=None, layer=replace(target.config, storages=((("layer",), "fp8"),)))
    first = Eagle3Config(layer=target.config, target_hidden_size=target.config.hidden_size, captured_layers=(0, 1, 2))
    for config, said in (
        (mapped, "HEAD has a token map, which its format has no place for"),
        (quantised, "HEAD is quantised"),
        (first, "layer 0"),
        (MTPConfig(layer=target.config, target_hidden_size=mapped.target_hidden_size, draft_vocab_size=8), "has a token map"),
        (MTPConfig(layer=quantised.layer, target_hidden_size=mapped.target_hidden_size), "is quantised"),
    ):
        monkeypatch.setattr("jaxspec.train.new_head.load_head", lambda *_, config=config: SimpleNamespace(config=config))
        with pytest.raises(ValueError, match=said):
            begin = None if config.algorithm == "MTP" else "HEAD"
            trainer(TrainSettings(config.algorithm.lower(), begin=begin, rows=4, length=24), target, data, tmp_path / "work")


@pytest.mark.exhaustive
def test_the_engine_evaluates(tmp_path, target, data):
    run = trainer(SETTINGS, target, data, tmp_path / "work")
    trial = Trial.of(run.parts.heldout, 3, 8, 64)
    assert len(trial.prompts) == 3 and trial.prompts[0] == run.parts.heldout[0].tokens[: run.parts.heldout[0].answers[0][0]]
    lengths = accept_lengths(target, run.trained(), None, trial, TreeShape(2, 1), (0.0, 1.0))
    assert all(1 <= length <= 3 for length in lengths) and texts_agree(target, run.trained(), None, trial, TreeShape(2, 1)) == 3
    lengths = {("5/4/8", 0.0): 1.234, ("5/4/8", 1.0): 2.0, ("3/1/4", 0.0): 1.5, ("3/1/4", 1.0): 1.25}
    text = card("a model", {"data": "little"}, lengths)
    assert "| data | little |" in text and "| temperature | 5/4/8 | 3/1/4 |" in text and "| 0 | 1.23 | 1.50 |" in text


def test_mtp_needs_a_layer_of_the_model(tmp_path, target, data):
    directory = write_target(tmp_path / "target", target)
    with pytest.raises(ValueError):
        trainer(TrainSettings("mtp", rows=4, length=24), target, data, tmp_path / "work", directory)


@pytest.mark.exhaustive
def test_the_command_writes_a_head_its_card_and_its_curves(tmp_path, data, capsys, monkeypatch):
    monkeypatch.setattr(command, "TREES", ("2/1/3",))
    monkeypatch.setattr(command, "EVALUATED_TREE", TreeShape(2, 1))
    directory, out = write_target(tmp_path / "target", tiny_target()), tmp_path / "head"
    sizes = ["--length", "96", "--rows", "2", "--depth", "2", "--steps", "4", "--eval-every", "2", "--eval-prompts", "2"]
    assert command.main(["head", "--model-path", str(directory), "--data", str(data), "--out", str(out), *sizes]) == 0
    printed = capsys.readouterr().out
    assert "step 2: loss" in printed and "equal to plain decoding | 2 of 2 greedy texts" in printed
    assert (out / "README.md").read_text() in printed and load_head(out, tiny_target()).config.algorithm == "EAGLE3"
    [events] = (tmp_path / "head.work").glob("events*")
    entries = [json.loads(line) for line in (tmp_path / "head.work/log.jsonl").read_text().splitlines()]
    means = [sum(entry["accept_lengths"]) / len(command.TEMPERATURES) for entry in entries]  # greedy and sampled
    assert json.loads((tmp_path / "head.work/best.json").read_text())["accept_length"] == pytest.approx(max(means), abs=1e-3)
    assert all(name in events.read_bytes() for name in (b"loss/held_out", b"accept_length", b"right_drafts/2"))
