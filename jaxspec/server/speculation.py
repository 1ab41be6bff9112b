"""Speculation, request by request: what a client may ask for, and what it gets to see."""

from typing import Any

from jaxspec.config import PLAIN, SpecConfig
from jaxspec.engine.output import TokenTrace
from jaxspec.engine.request import DraftedTree, Speculation, Update
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.errors import ApiError
from jaxspec.server.fields import Strict, TokensOrNone
from jaxspec.server.model import ServedModel


class SpeculativeField(Strict):
    """`speculative` of a request: {"enabled": false}, or the three numbers of a compiled tree; and whether to show the trees."""

    enabled: bool | None = None
    """False: plain decoding for this request."""
    num_steps: TokensOrNone | None = None
    eagle_topk: TokensOrNone | None = None
    num_draft_tokens: TokensOrNone | None = None
    trace: bool | None = None
    """With stream: every chunk says where its tokens come from and what was drafted."""


def chosen_tree(field: SpeculativeField | None, model: ServedModel) -> SpecConfig | None:
    """The tree that a request asks for; None if it leaves that to the engine. Raises ApiError for one that is not compiled."""
    if field is None:
        return None
    numbers = field.num_steps, field.eagle_topk, field.num_draft_tokens
    if numbers == (None, None, None):
        if field.enabled and model.spec == PLAIN:
            raise ApiError(400, "speculative.enabled: this server has no draft head", param="speculative.enabled")
        return _compiled(PLAIN, model) if field.enabled is False else None
    if field.enabled is False:
        raise ApiError(400, "speculative: give enabled = false or a tree, not both", param="speculative")
    try:
        tree = SpecConfig(*numbers)
    except ValueError as error:
        raise ApiError(400, f"speculative: {error}", param="speculative") from None
    return _compiled(tree, model)


def _compiled(tree: SpecConfig, model: ServedModel) -> SpecConfig:
    if tree not in model.trees:
        message = f"speculative: the tree {tree} is not compiled; this server has: {', '.join(map(str, model.trees))}"
        raise ApiError(400, f"{message} (0/1/1 is plain decoding)", param="speculative")
    return tree


def wants_trace(field: SpeculativeField | None, *, stream: bool | None, completions: int) -> bool:
    """Raises ApiError if a trace is wanted of what has none."""
    if field is None or not field.trace:
        return False
    if not stream or completions != 1:
        raise ApiError(400, "speculative.trace needs stream to be true, one prompt and n = 1", param="speculative.trace")
    return True


class Trace:
    """Makes the `speculative_trace` of each chunk."""

    def __init__(self, model: ServedModel, params: SamplingParams):
        self._model, self._tokens = model, TokenTrace(model.tokenizer, params)

    def add(self, update: Update) -> dict[str, Any]:
        """What one update brought: tokens with their origins, and the tree that they come from."""
        tokens = [
            {"id": token.id, "text": token.text, "from": token.origin} | ({"depth": token.depth} if token.depth else {})
            for token in self._tokens.add(update)
        ]
        verification = update.verification
        tree = None
        if verification is not None and verification.tree is not None:
            tree = self._shown(verification.tree, verification.spec)
        return {"tokens": tokens, "tree": tree}

    def _shown(self, tree: DraftedTree, spec: SpecConfig) -> dict[str, Any]:
        texts = [None if self._model.tokenizer is None else self._model.token_text(token) for token in tree.tokens]
        return {"shape": str(spec), "tokens": texts, "parents": list(tree.parents), "accepted": list(tree.accepted)}


def vllm_metrics(speculation: Speculation) -> dict[str, Any] | None:
    """vLLM's per-request `metrics.speculative_decoding`, by its names; None without a cycle that had a tree."""
    accept_length = speculation.tree_accept_length
    if accept_length is None:
        return None
    return {
        "mean_acceptance_length": round(accept_length, 4),
        "draft_acceptance_rate": round(speculation.accept_rate, 4),
        "acceptance_histogram": acceptance_histogram(speculation),
        "num_spec_steps": len(speculation.with_tree),
        "num_accepted_draft_tokens": speculation.accepted_drafts,
        "num_draft_tokens": speculation.proposed_drafts,
    }


def sglang_details(speculation: Speculation) -> dict[str, Any]:
    """SGLang's per-request counts, by its names: of `meta_info`, and of `sglext.spec_tokens_details`."""
    return {
        "spec_verify_ct": speculation.verify_count,
        "spec_accept_length": round(speculation.accept_length, 4),
        "spec_accept_rate": round(speculation.accept_rate, 4),
        "spec_num_correct_drafts": speculation.accepted_drafts,
        "spec_num_proposed_drafts": speculation.proposed_drafts,
        "spec_correct_drafts_histogram": acceptance_histogram(speculation),
    }


def acceptance_histogram(speculation: Speculation) -> list[int]:
    """How many cycles with a tree had 0, 1, 2, ... of their drafts accepted and emitted."""
    counts = [0] * (1 + max((cycle.num_steps for cycle in speculation.with_tree), default=0))
    for cycle in speculation.with_tree:
        counts[cycle.accepted] += 1
    return counts
