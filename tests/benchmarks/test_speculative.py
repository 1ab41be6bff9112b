"""The tuner: which trees it tries, what it predicts, what it chooses, and what it writes."""

import json
from pathlib import Path

import pytest

from benchmarks import speculative, tuning
from benchmarks.options import RESULTS
from benchmarks.speculative_tables import config_file, notes, tables
from benchmarks.tuning import Timed, describe, dominated, grid, shortlist, why_not
from jaxspec.commands.serve_options import parse_arguments
from jaxspec.commands.workbench import Pass
from jaxspec.tree_shape import TreeShape

CHAIN, WIDE, SHORT = TreeShape(3, 1, 4), TreeShape(3, 4, 8), TreeShape(1, 1, 2)


def passes(*seconds: float) -> list[Pass]:
    """Runs that gave 100 tokens in these times."""
    return [Pass(seconds=each, tokens=[tuple(range(100))]) for each in seconds]


def confirmed(tree: TreeShape, speed_up: float) -> dict:
    return describe(timed(tree, 1.5, speed_up), 2.0)


def timed(tree: TreeShape, cost: float, speed_up: float | None = None) -> Timed:
    """A tree whose cycle costs so many plain steps, and that was this much faster end to end."""
    each = Timed(tree, cycle_ms=[10 * cost], cost=[cost])
    if speed_up is not None:
        each.plain_passes, each.tree_passes = passes(3.0, 3.0, 3.0), passes(*[3.0 / speed_up] * 3)
    return each


def results_of(*batches: tuple[int, str, list[Timed]], exhaustive: bool = False) -> dict:
    """Results as the command records them; every tree accepts two tokens."""
    trees = {each.tree for _, _, several in batches for each in several}
    accepted = {"accept_length": 2.0, "by_depth": [1.0], "equal": 2, "prompts": 2}
    return {
        "exhaustive": exhaustive,
        "acceptance": {str(tree): accepted for tree in trees},
        "dominated": {},
        "batches": [
            {
                "batch": batch,
                "choice": chosen,
                "candidates": [],
                "confirmed": confirmed(several[0].tree, 1.37),
                "trees": [describe(each, 2.0) for each in several],
            }
            for batch, chosen, several in batches
        ],
    }


def record_of(results: dict) -> dict:
    where = {"date": "2026-11-22T10:00:00+00:00", "jax": "0.12", "cpu": "a CPU", "cores": 2, "devices": ["cpu"]}
    return {"benchmark": "speculative", "command": "python -m benchmarks.speculative", "environment": where, "results": results}


def test_the_grid_has_every_tree_that_makes_sense_once():
    trees, skipped = grid([0, 1, 3], [0, 1, 2, 4], [0, 2, 4, 8, 16])
    assert [str(tree) for tree in trees] == [
        "1/1/2", "1/2/2", "1/4/2", "1/4/4", "3/1/4", "3/2/4", "3/2/8", "3/4/4", "3/4/8", "3/4/16",
    ]  # fmt: skip
    assert skipped["3/2/16"] == "more nodes than 1 + topk + (steps - 1) * topk^2 = 11 that are drafted"
    assert skipped["3/4/2"].startswith("2 nodes cannot hold a path of 3 drafts")
    assert not any(name.endswith("/0") for name in skipped)


@pytest.mark.parametrize(("steps", "topk"), [(1, 2), (2, 2), (3, 4), (5, 8)])
def test_the_rule_for_nodes_is_that_of_the_engine(steps, topk):
    most = 1 + topk + (steps - 1) * topk**2
    assert why_not(steps, topk, most) is None and TreeShape(steps, topk, most)
    assert why_not(steps, topk, most + 1)
    with pytest.raises(ValueError, match="num_draft_tokens"):
        TreeShape(steps, topk, most + 1)


def test_a_tree_that_a_smaller_one_matches_need_not_be_timed():
    lengths = {SHORT: 1.5, CHAIN: 2.0, WIDE: 2.0, TreeShape(5, 4, 8): 1.9, TreeShape(5, 4, 16): 2.5}
    assert dominated(lengths) == {WIDE: CHAIN, TreeShape(5, 4, 8): CHAIN}
    assert dominated({SHORT: 1.5, CHAIN: 1.49}) == {CHAIN: SHORT}
    longer = TreeShape(5, 1, 6)
    assert dominated({SHORT: 1.5, CHAIN: 1.507, longer: 1.514}) == {CHAIN: SHORT}  # tolerances don't add up
    assert not dominated({TreeShape(1, 4, 4): 2.0, CHAIN: 1.0})  # wider but shorter: who knows what costs more


def test_a_tree_whose_head_drafts_fewer_levels_is_smaller():
    deep, limited = TreeShape(7, 4, 8), TreeShape(7, 4, 8, 3)
    assert dominated({deep: 2.0, limited: 2.0}) == {deep: limited}
    assert not dominated({deep: 2.1, limited: 2.0})


def test_the_config_file_of_n_grams_beside_a_head_is_one_that_the_server_takes(tmp_path):
    path, limited = tmp_path / "tuned.yaml", TreeShape(7, 4, 8, 3)
    trees = [timed(limited, 1.5, 1.4), timed(CHAIN, 1.2, 1.1)]
    results = results_of((1, "7/4/8/3", trees), (8, "3/1/4", trees)) | {"ngram": True}
    path.write_text(config_file(record_of(results)))
    arguments = parse_arguments(["--config", str(path)])
    assert arguments.tree == limited and arguments.engine["ngram"] and arguments.engine["adaptive_trees"] == (limited, CHAIN)


def test_only_promising_trees_are_measured():
    several = [timed(SHORT, 1.2, 1.1), timed(CHAIN, 1.5, 1.4), timed(WIDE, 3.0, 0.9)]
    listed = shortlist(several, {SHORT: 1.8, CHAIN: 2.4, WIDE: 2.6})  # predicted 1.5, 1.6, 0.87
    assert [each.tree for each in listed] == [CHAIN, SHORT]


def test_a_tournament_ends_with_the_fastest(monkeypatch):
    true = dict(zip((SHORT, CHAIN, WIDE, TreeShape(2, 1, 3), TreeShape(5, 1, 6)), (1.1, 1.5, 0.8, 1.4, 1.2), strict=True))
    rounds = dict.fromkeys(true, 0)

    def measure(_sweep, left, batch, count, _counter):
        for each in left:
            rounds[each.tree] += count
            each.plain_passes += passes(*[3.0] * count)
            each.tree_passes += passes(*[3.0 / true[each.tree]] * count)

    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(tuning, "warm_up", lambda *_: None)
    assert tuning.tournament(None, [timed(tree, 1.0) for tree in true], 1, 3, None).tree == CHAIN
    assert rounds == {SHORT: 1, WIDE: 1, TreeShape(5, 1, 6): 1, CHAIN: 4, TreeShape(2, 1, 3): 4}


def test_the_config_file_is_one_that_the_server_takes(tmp_path):
    path = tmp_path / "tuned.yaml"
    trees = [timed(CHAIN, 1.5, 1.4), timed(SHORT, 1.2, 1.1)]
    path.write_text(config_file(record_of(results_of((1, "3/1/4", trees), (8, "plain", trees)))))
    arguments = parse_arguments(["--config", str(path)])
    assert arguments.tree == CHAIN and arguments.engine["adaptive"] and arguments.engine["max_running_requests"] == 8
    assert "# | 1     |     3/1/4 |" in path.read_text()
    assert arguments.engine["adaptive_trees"] == (CHAIN,)  # nothing that was not measured
    path.write_text(config_file(record_of(results_of((1, "3/1/4", trees), (2, "1/1/2", trees), (4, "plain", trees)))))
    assert parse_arguments(["--config", str(path)]).engine["adaptive_trees"] == (CHAIN, SHORT)
    path.write_text(config_file(record_of(results_of((2, "3/1/4", trees)))))
    assert not parse_arguments(["--config", str(path)]).engine.get("adaptive")
    path.write_text(config_file(record_of(results_of((2, "plain", trees)))))
    assert parse_arguments(["--config", str(path)]).tree.num_steps == 0


def test_the_server_gets_no_option_of_a_head_where_plain_decoding_is_the_fastest():
    bits = ["--speculative-draft-model-quantization", "int8"]
    options = speculative.parse(["--model-path", "m", "--draft", "d", *bits, "--tp-size", "2"])
    for choice, of_head in (("plain", ""), ("3/1/4", f"--speculative-draft-model-path ... {bits[0]} ... ")):
        told = speculative.server_command(options, results_of((1, choice, [timed(CHAIN, 1.5, 1.4)])))
        assert told == f"jaxspec serve --model-path ... {of_head}--tp-size ... --config speculative.yaml"


def test_what_is_quoted_was_measured_again():
    made = tables(results_of((4, "3/1/4", [timed(CHAIN, 1.5, 1.4), timed(SHORT, 1.2, 1.5)]), exhaustive=True))
    assert list(made) == ["best", "time", "batch 4"] and "1.37 (1.37..1.37)" in made["best"]


@pytest.mark.parametrize(
    ("tp", "devices", "said"), [(2, ["cpu", "cpu"], True), (1, ["cpu"], False), (2, ["NVIDIA H100"] * 2, False)]
)
def test_it_says_that_virtual_devices_are_none(tp, devices, said):
    record = record_of(results_of((4, "3/1/4", [timed(CHAIN, 1.5, 1.4)])))
    record |= {"flags": {"tp_size": tp}, "environment": record["environment"] | {"devices": devices}}
    assert ("the devices are virtual" in notes(record)) == said


@pytest.fixture(scope="module")
def tuned(tiny, tmp_path_factory) -> dict:
    """A whole run on a tiny model."""
    out = tmp_path_factory.mktemp("tuned") / "new/out.jsonl"
    flags = ["--trees", "1/1/2", "2/2/4", "--batch-size", "1", "3", "--rounds", "2", "--max-tokens", "20", "--exhaustive"]
    config = out.parent.with_name("other") / "a.yaml"
    assert speculative.main([*tiny, *flags, "--out", str(out), "--config-out", str(config)]) == 0
    parse_arguments(["--config", str(config)])
    return {"out": out, "record": json.loads(out.read_text())}


@pytest.mark.exhaustive
def test_a_run_measures_every_tree_at_every_batch_size(tuned):
    results = tuned["record"]["results"]
    assert set(results["acceptance"]) == {"1/1/2", "2/2/4"}
    assert all(each["equal"] == each["prompts"] == 2 for each in results["acceptance"].values())
    assert [at["batch"] for at in results["batches"]] == [1, 3]
    for at in results["batches"]:
        assert {each["tree"] for each in at["trees"]} == {"1/1/2", "2/2/4"}
        for each in at["trees"]:
            assert len(each["cost"]["values"]) == len(each["speed_up"]["values"]) == 2 and each["cycle_ms"] > 0
            tree, plain = each["tokens_per_second"]["values"], each["plain_tokens_per_second"]["values"]
            assert each["speed_up"]["values"] == pytest.approx([fast / slow for fast, slow in zip(tree, plain, strict=True)])
            accepted = results["acceptance"][each["tree"]]["accept_length"]
            assert each["predicted_speed_up"] == pytest.approx(accepted / each["cost"]["median"])
    assert "--trees 1/1/2 2/2/4" in tuned["record"]["command"]


@pytest.mark.exhaustive
def test_a_record_tells_no_place_of_the_machine(tuned, tiny):
    text = json.dumps(tuned["record"])
    for place in (tuned["out"].parent, *(Path(option).parent for option in tiny if option.startswith("/"))):
        assert str(place) not in text


@pytest.mark.exhaustive
def test_what_was_dropped_is_no_candidate_and_the_winner_is_measured_anew(tuned):
    results = tuned["record"]["results"]
    for at in results["batches"]:
        assert at["candidates"] and not set(at["candidates"]) & set(results["dominated"])
        assert at["confirmed"]["tree"] in at["candidates"] and at["choice"] in ("plain", at["confirmed"]["tree"])
        (same,) = [each for each in at["trees"] if each["tree"] == at["confirmed"]["tree"]]
        assert at["confirmed"]["speed_up"]["values"] != same["speed_up"]["values"]


def test_brute_force_has_results_of_its_own():
    assert [speculative.parse(flags).out.name for flags in ([], ["--exhaustive"])] == [
        "speculative.jsonl", "speculative_exhaustive.jsonl",
    ]  # fmt: skip
    assert speculative.parse([]).out.parent == RESULTS and speculative.parse(["--model", "mine"]).out == Path("speculative.jsonl")


def test_a_model_without_a_head_is_an_error(tiny, tmp_path):
    with pytest.raises(ValueError, match="no draft head: give --draft"):
        speculative.main([*tiny[:2], *tiny[4:], "--trees", "2/1/3", "--out", str(tmp_path / "out.jsonl")])


def test_too_few_tokens_to_time_a_cycle_are_an_error(tiny, tmp_path):
    flags = [*tiny, "--trees", "3/1/4", "--batch-size", "1", "--max-tokens", "8", "--out", str(tmp_path / "out.jsonl")]
    with pytest.raises(Exception, match="too small to time cycles of 3/1/4: give at least 20"):
        speculative.main(flags)
