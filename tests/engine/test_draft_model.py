"""A small model as the draft: a model that drafts for itself is fully accepted. (test_sources.py: the text is plain decoding's.)"""

from pathlib import Path

import pytest

from jaxspec.checkpoints.draft_models import as_draft
from jaxspec.config import FP8
from jaxspec.engine.request import GenerationRequest
from jaxspec.load import load_models
from jaxspec.sampling_params import SamplingParams
from jaxspec.testing import engine_target, largest_sizes_only, random_draft_model, tiny_engine, write_target
from jaxspec.tree_shape import PLAIN, TreeShape
from pallas_kernels.quantized import QuantizedAs
from tests.engine.served import served
from tests.engine.test_equality import PROMPTS, run
from tests.sets import exhaustive

TREE = TreeShape(3, 2, 11)
TARGET = engine_target(num_layers=2)
ITSELF = as_draft(TARGET, TARGET.config)
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=19, temperature=0.8, seed=1),
    SamplingParams(max_tokens=14, temperature=1.3, seed=2, top_p=0.9, frequency_penalty=0.6),
    SamplingParams(max_tokens=20, temperature=0, repetition_penalty=1.3, logit_bias={3: 2.0}),
    SamplingParams(max_tokens=9, temperature=0.7, seed=4, top_k=9, bad_token_ids=[5, 6]),
    SamplingParams(max_tokens=24, temperature=1.0, seed=5, min_p=0.02, presence_penalty=0.5),
]


@pytest.mark.exhaustive
def test_the_text_is_plain_decodings_with_a_draft_of_another_shape_and_a_padded_vocabulary():
    """The draft's vocabulary is shorter than the target's, and longer, as Qwen2.5's are."""
    for of_target, of_draft in ((128, 127), (127, 128)):
        target = engine_target(vocab_size=of_target)
        draft = random_draft_model(target.config, vocab_size=of_draft, num_layers=1, num_kv_heads=1, tie_word_embeddings=True)
        prompts = [[token % 127 for token in prompt] for prompt in PROMPTS]
        plain, engine = tiny_engine(PLAIN, target=target), tiny_engine(TREE, target=target, head=draft)
        assert run(engine, prompts, PARAMS) == run(plain, prompts, PARAMS)


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        (TreeShape(3, 1), {}),
        exhaustive(TreeShape(4, 1), {"page_size": 7, "prefill_chunk": 5}),
        exhaustive(TreeShape(3, 1), {"kv_cache_dtype": FP8}),
    ],
)
def test_a_model_that_drafts_for_itself_is_fully_accepted(tree, options):
    """Every slot, position and cached page of the draft must be right for that. (And the tree must be a chain: a beam may leave the
    path of likeliest tokens.) The prompt takes several chunks, and the second begins with what the first one left in the prefix
    cache."""
    full = tree.num_steps + 1
    engine = tiny_engine(tree, target=TARGET, head=ITSELF, **options)
    prompt, params = list(range(40, 77)), SamplingParams(max_tokens=1 + 6 * full, temperature=0)
    (first,) = served(engine, GenerationRequest(prompt, params))
    (again,) = served(engine, GenerationRequest([*prompt, *first.output], params))
    assert first.speculation.accept_lengths == again.speculation.accept_lengths == (full,) * 6
    assert again.cached_tokens >= len(prompt)
    several = [SamplingParams(max_tokens=1 + 6 * full, temperature=0.9, seed=seed) for seed in range(4)]
    lengths = [each.speculation.accept_length for each in served(engine, *(GenerationRequest(prompt, each) for each in several))]
    assert sum(lengths) / 4 > 0.75 * full, "drafted under the noise of its own choice; the learnt weights cost a little"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows have whole groups of 4 bits."""
    return write_target(tmp_path_factory.mktemp("model"), engine_target(hidden_size=64, intermediate_size=128, head_dim=16))


@pytest.mark.variants
@pytest.mark.parametrize(
    ("of_target", "of_draft", "kind"),
    [(None, "int8", "int8"), exhaustive("int8", None, "int8"), exhaustive("fp8", "int4", "int4"), exhaustive("int8", "none", None)],
)
def test_a_draft_is_quantised_as_its_target_or_apart(written, of_target, of_draft, kind):
    """The text is the target's own, in its bits; the same model in fewer bits still drafts much of it."""
    options = {"quantization": of_target, "max_running_requests": 2, "page_size": 4, "prefill_chunk": 16, "context_length": 80}
    models = load_models(written, written, "3/1/4", speculative_draft_model_quantization=of_draft, progress=False, **options)
    plain = load_models(written, tree="plain", progress=False, **options)
    for engine in (models.engine, plain.engine):
        largest_sizes_only(engine)
    assert models.head is not None and models.algorithm == "STANDALONE"
    kinds = {storage.kind for _, storage in models.head.config.layer.storages if isinstance(storage, QuantizedAs)}
    assert kinds == ({kind} if kind else set())
    assert run(models.engine, PROMPTS, PARAMS) == run(plain.engine, PROMPTS, PARAMS)
    stats = models.engine.stats()
    assert stats.accepted_tokens > 0.2 * stats.draft_tokens
