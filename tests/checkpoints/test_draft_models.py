"""Small models that draft: what is taken for one, what is loaded, and which do not go with which target."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from convert.converting import Options, convert_target
from jaxspec.checkpoints.draft_models import check_draft, draft_kind, load_draft
from jaxspec.defaults import BUILT_IN_TARGET
from jaxspec.load import load_models
from jaxspec.testing import random_eagle, random_mtp, tiny_config, tiny_target, write_head, write_target
from jaxspec.text.tokenizer import check_same_tokens
from pallas_kernels.quantized import QuantizedAs
from tests.checkpoints.test_quantization import published
from tests.checkpoints.test_targets import same


def test_whole_models_without_a_head_draft(tmp_path):
    model, mimo = tiny_target(1, num_layers=1), tiny_target(qkv_bias=True, num_layers=1)
    convert_target(write_target(tmp_path / "model", model), tmp_path / "converted", Options())
    write_target(tmp_path / "mimo", mimo, head=random_mtp(mimo.config))
    write_head(tmp_path / "head", random_eagle(model.config))
    kinds = {"model": "STANDALONE", "converted": "STANDALONE", "mimo": "MTP", "head": "EAGLE"}
    assert {name: draft_kind(tmp_path / name) for name in kinds} == kinds
    for name in ("model", "converted"):
        check_draft(tmp_path / name, tiny_config())
        loaded = load_draft(tmp_path / name, tiny_target(num_layers=1))
        assert loaded.config.algorithm == "STANDALONE" and loaded.config.feature_size == 0
        assert same(loaded.params, {"model": model.params})


def test_another_vocabulary_and_token_maps_are_refused(tmp_path):
    path = write_target(tmp_path / "model", tiny_target(vocab_size=96))
    said = "model: the draft model's vocabulary has 96 tokens, the target's 128: give a draft model with the target's tokenizer"
    with pytest.raises(ValueError, match=said):
        check_draft(path, tiny_config())
    with pytest.raises(ValueError, match=said):
        load_draft(path, tiny_target())
    with pytest.raises(ValueError, match=r"token map hot\.json is for heads, and .*model is a whole model"):
        check_draft(path, tiny_config(vocab_size=96), Path("hot.json"))


def test_the_targets_quantisation_is_not_for_a_draft_that_has_its_own(tmp_path):
    """What was asked for the draft itself is an error, as it is for a target."""
    stored, dense = published(tmp_path, "GPTQ", num_layers=1)
    convert_target(stored, tmp_path / "converted", Options())
    for draft, kind in ((stored, "int4"), (tmp_path / "converted", "int4"), (dense, "int8")):
        models = load_models(dense, draft, quantization="int8", progress=False)
        assert models.head is not None
        for config, expected in ((models.target.config, "int8"), (models.head.config.layer, kind)):
            assert {storage.kind for _, storage in config.storages if isinstance(storage, QuantizedAs)} == {expected}
    with pytest.raises(ValueError, match="is quantised already"):
        load_models(dense, stored, speculative_draft_model_quantization="int8", progress=False)


def with_tokenizer(directory: Path, change: Callable[[dict], None]) -> Path:
    """A copy of the built-in model with another tokenizer."""
    shutil.copytree(BUILT_IN_TARGET, directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    change(content)
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


def test_another_tokenizer_is_refused(tmp_path, monkeypatch):
    def swap(content: dict) -> None:
        content["model"]["vocab"] |= {"!": 2, '"': 1}

    monkeypatch.setattr("jaxspec.load.load_target", lambda *_, **__: pytest.fail("too late"))
    swapped = with_tokenizer(tmp_path / "swapped", swap)
    with pytest.raises(
        ValueError, match=r"""swapped has another tokenizer than the target: its token 1 is '"', the target's '!';"""
    ):
        load_models(BUILT_IN_TARGET, swapped)


def test_special_tokens_may_have_other_names(tmp_path):
    def rename(content: dict) -> None:
        content["added_tokens"][0]["content"] = "<|end|>"
        content["model"]["vocab"] = {"<|end|>": 0} | {name: id for name, id in content["model"]["vocab"].items() if id}

    check_same_tokens(BUILT_IN_TARGET, with_tokenizer(tmp_path / "renamed", rename))
