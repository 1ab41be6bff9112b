"""What the server checks before it loads weights: that the head is what --speculative-algorithm says."""

import logging

import pytest

from jaxspec.serve import check_algorithm, load
from jaxspec.server.arguments import parse_arguments
from jaxspec.testing import random_eagle, random_head, random_mtp, tiny_config, tiny_target, write_head, write_target


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Directories of tiny models and heads."""
    root = tmp_path_factory.mktemp("models")
    mimo = tiny_target(qkv_bias=True)
    return {
        "target": write_target(root / "target", tiny_target()),
        "mimo": write_target(root / "mimo", mimo, head=random_mtp(mimo.config)),
        "eagle": write_head(root / "eagle", random_eagle(tiny_config())),
        "eagle3": write_head(root / "eagle3", random_head(tiny_config())),
    }


def arguments(places, model, algorithm, draft=None, more=""):
    command = f"--model-path {places[model]} --speculative-algorithm {algorithm} {more}".split()
    return parse_arguments(command + (["--speculative-draft-model-path", str(places[draft])] if draft else []))


@pytest.mark.parametrize(
    ("model", "algorithm", "draft"),
    [
        ("target", "EAGLE", "eagle"),
        ("target", "eagle3", "eagle3"),
        ("mimo", "EAGLE", None),
        ("mimo", "NEXTN", None),
        ("mimo", "NONE", None),
    ],
)
def test_the_right_names(places, model, algorithm, draft):
    check_algorithm(arguments(places, model, algorithm, draft))


@pytest.mark.parametrize(
    ("model", "algorithm", "draft", "message"),
    [
        ("target", "EAGLE", "eagle3", "EAGLE was given, but .*eagle3 holds an EAGLE3 head"),
        ("target", "EAGLE3", "eagle", "EAGLE3 was given, but .*eagle holds an EAGLE head"),
        ("target", "NEXTN", "eagle", "NEXTN was given, but .*eagle holds an EAGLE head"),
        ("mimo", "EAGLE3", None, "mimo holds an MTP head"),
        ("target", "EAGLE", None, "target holds no head: give --speculative-draft-model-path"),
        ("target", "EAGLE3", "target", "target holds no head"),
    ],
)
def test_a_name_that_the_head_is_not(places, model, algorithm, draft, message):
    with pytest.raises(ValueError, match=message):
        check_algorithm(arguments(places, model, algorithm, draft))


def test_the_name_is_checked_when_the_model_is_loaded(places):
    with pytest.raises(ValueError, match=r"EAGLE was given, but .*eagle3 holds an EAGLE3 head"):
        load(arguments(places, "target", "EAGLE", "eagle3"))


def test_the_dtype_arrives(places, monkeypatch):
    monkeypatch.setattr("jaxspec.engine.engine.Engine.warm_up", lambda engine, **_: 0.0)
    llm = load(arguments(places, "target", "EAGLE", "eagle", "--dtype bfloat16 --log-level error"))
    assert llm.target.params["embed_tokens"].dtype == llm.head.params["fc"]["kernel"].dtype == "bfloat16"


def test_the_built_in_model_has_an_eagle3_head():
    check_algorithm(parse_arguments(["--speculative-algorithm", "EAGLE3"]))
    with pytest.raises(ValueError, match="holds an EAGLE3 head"):
        check_algorithm(parse_arguments(["--speculative-algorithm", "EAGLE"]))


def test_a_tree_without_a_head_is_refused_before_weights_are_read(places):
    command = ["--model-path", str(places["target"]), "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
    with pytest.raises(ValueError, match="the draft tree 3/1/4 needs a draft head, and target comes with none"):
        load(parse_arguments(command))


def test_an_unused_token_map_is_a_line_in_the_log(places, tmp_path, monkeypatch, caplog):
    (tmp_path / "map.json").write_text("[1, 2]")
    monkeypatch.setattr("jaxspec.engine.engine.Engine.warm_up", lambda engine, **_: 0.0)
    with caplog.at_level(logging.INFO, "jaxspec"):
        load(arguments(places, "target", "EAGLE3", "eagle3", f"--speculative-token-map {tmp_path / 'map.json'} --log-level error"))
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1 and "map.json is not used" in said[0]
    assert any("EAGLE3 draft tree 5/4/8" in record.message for record in caplog.records)


def test_lossy_thresholds_are_a_line_in_the_log(places, monkeypatch, caplog):
    monkeypatch.setattr("jaxspec.engine.engine.Engine.warm_up", lambda engine, **_: 0.0)
    command = "--speculative-accept-threshold-single 0.9 --log-level error"
    load(arguments(places, "target", "EAGLE3", "eagle3", command))
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1 and "--speculative-accept-threshold-single" in said[0] and "lossy" in said[0]


def test_a_cache_below_the_context_length_is_told(places, monkeypatch, caplog):
    monkeypatch.setattr("jaxspec.engine.engine.Engine.warm_up", lambda engine, **_: 0.0)
    llm = load(arguments(places, "target", "EAGLE3", "eagle3", "--max-total-tokens 100 --log-level error"))
    assert llm.engine.stats().total_pages == 6
    assert any("up to 96 tokens" in record.message for record in caplog.records if record.levelno == logging.WARNING)


@pytest.mark.parametrize("flag", ["--speculative-adaptive", "--speculative-accept-threshold-acc 0.5"])
def test_flags_for_a_head_without_one_are_refused(places, flag, monkeypatch):
    monkeypatch.setattr("jaxspec.engine.engine.Engine.warm_up", lambda engine, **_: pytest.fail("too late"))
    command = ["--model-path", str(places["target"]), "--log-level", "error", *flag.split()]
    with pytest.raises(ValueError, match=f"^{flag.split()[0]} has no use without a draft head"):
        load(parse_arguments(command))
