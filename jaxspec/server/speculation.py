"""Speculation per request: the client's options, and the figures and trees in the response."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from jaxspec.engine.output import traced_tokens
from jaxspec.engine.request import GenerationRequest, Update
from jaxspec.engine.speculation import Speculation
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.errors import ApiError, wrong
from jaxspec.server.fields import CacheSalt, Priority, RequestModel, TokenCountOrZero
from jaxspec.server.model import ServedModel
from jaxspec.server.sending import ResponseModel
from jaxspec.tree_shape import PLAIN, TreeShape


class SpeculativeOptions(RequestModel):
    """The field `speculative` of a request: {"enabled": false} or the numbers of a compiled tree, and whether to show trees."""

    enabled: bool | None = None
    """False: plain decoding for this request."""
    num_steps: TokenCountOrZero | None = None
    eagle_topk: TokenCountOrZero | None = None
    num_draft_tokens: TokenCountOrZero | None = None
    head_steps: TokenCountOrZero | None = None
    trace: bool | None = None
    """With stream: every event shows where its tokens come from and what was drafted."""


def chosen_tree(options: SpeculativeOptions | None, model: ServedModel) -> TreeShape | None:
    """The tree that a request asks for; None if the engine chooses. Raises ApiError for a tree that is not compiled."""
    if options is None:
        return None
    numbers = options.num_steps, options.eagle_topk, options.num_draft_tokens, options.head_steps
    if numbers == (None,) * len(numbers):
        if options.enabled and model.tree == PLAIN:
            raise wrong("speculative.enabled", "must not be true: this server has no draft head")
        return _compiled(PLAIN, model) if options.enabled is False else None
    if options.enabled is False:
        raise wrong("speculative:", "give enabled = false or a tree, not both")
    try:
        tree = TreeShape(*numbers)
    except ValueError as error:
        raise wrong("speculative:", str(error)) from None
    return _compiled(tree, model)


def _compiled(tree: TreeShape, model: ServedModel) -> TreeShape:
    if tree not in model.trees:
        message = f"speculative: the tree {tree} is not compiled; this server has: {', '.join(map(str, model.trees))}"
        raise ApiError(400, f"{message} (0/1/1 is plain decoding); --speculative-request-trees adds others", param="speculative")
    return tree


class SharedFields(RequestModel):
    """The fields of a request's body that all its completions share."""

    stream: bool | None = None
    cache_salt: CacheSalt | None = None
    """vLLM's: cached prefixes, and texts that drafts are taken from, are shared with requests of the same salt only."""
    priority: Priority | None = None
    """Larger is more urgent, as in SGLang. (In vLLM smaller is.)"""
    speculative: SpeculativeOptions | None = None
    """Our own: speculation for this request."""


def requests_of(
    body: SharedFields, model: ServedModel, prompts: Sequence[tuple[tuple[int, ...], SamplingParams]], n: int | None
) -> list[GenerationRequest]:
    """A request for each prompt, with its parameters, of which `n` completions are wanted. Raises ApiError, naming the field."""
    trace = body.speculative is not None and bool(body.speculative.trace)
    if trace and (not body.stream or len(prompts) * (n or 1) != 1):
        raise wrong("speculative.trace", "needs stream to be true, one prompt and n = 1")
    tree = chosen_tree(body.speculative, model)
    return [
        GenerationRequest(ids, params, body.priority or 0, tree=tree, cache_salt=body.cache_salt, wants_trees=trace)
        for ids, params in prompts
    ]  # fmt: skip


class ShownTree(TypedDict):
    """A draft tree. Node 0 is the root."""

    shape: str
    """levels/children/nodes, or levels/children/nodes/levels of the head"""
    tokens: list[str | None]
    parents: list[int]
    accepted: list[int]
    """The nodes of the accepted path, root first."""
    sources: NotRequired[list[str]]
    """Which source proposed each node below the root, as in MergedDrafts."""
    pruned: NotRequired[list[str | None]]
    """Under a grammar: drafts that it does not allow, which were removed from the tree."""
    forced: NotRequired[int]
    """Under a grammar: number of nodes that it forced, as it allows nothing else there."""


ShownToken = TypedDict("ShownToken", {"id": int, "text": str, "from": str, "depth": NotRequired[int]})
"""A token and its origin; `depth` of an accepted draft. See TracedToken in jaxspec/engine/output.py."""


class SpeculativeTrace(TypedDict):
    """Our own `speculative_trace` of an event."""

    tokens: list[ShownToken]
    tree: ShownTree | None
    """The tree that the tokens come from; null for prefill and plain decoding."""


def speculative_trace(update: Update, model: ServedModel) -> SpeculativeTrace:
    """The tokens of an update, and the tree that they come from."""
    tokens: list[ShownToken] = []
    for token in traced_tokens(update):
        tokens.append({"id": token.id, "text": token.text, "from": token.origin})
        if token.depth:
            tokens[-1]["depth"] = token.depth
    shown: ShownTree | None = None
    if (verification := update.verification) is not None and (tree := verification.tree) is not None:
        shape, texts = str(verification.shape), _texts(tree.tokens, model)
        shown = {"shape": shape, "tokens": texts, "parents": list(tree.parents), "accepted": list(tree.accepted)}
        if tree.sources:
            shown["sources"] = list(tree.sources)
        if tree.pruning is not None:
            shown |= {"pruned": _texts(tree.pruning.pruned, model), "forced": tree.pruning.forced}
    return {"tokens": tokens, "tree": shown}


def _texts(tokens: Sequence[int], model: ServedModel) -> list[str | None]:
    return [None if model.tokenizer is None else model.token_text(each) for each in tokens]


class MergedDrafts(ResponseModel):
    """What is told of merged drafts."""

    accepted_drafts_by_source: dict[str, int] | None = None
    """Accepted drafts by their source: head, ngram, both (head+ngram), or other (they filled the tree, or a grammar forced
    them). Only with several sources."""


class VllmSpeculation(MergedDrafts):
    """vLLM's `metrics.speculative_decoding`. Plain decoding steps don't count."""

    mean_acceptance_length: float
    """Tokens per verification, bonus included."""
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    """Numbers of verifications that accepted 0, 1, 2, ... drafts."""
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int


class SglangSpeculation(MergedDrafts):
    """SGLang's counts, in `meta_info` and `sglext.spec_tokens_details`. Plain decoding steps count as verifications."""

    spec_verify_ct: int
    spec_accept_length: float
    """Tokens per verification, bonus included."""
    spec_accept_rate: float
    spec_num_correct_drafts: int
    spec_num_proposed_drafts: int
    spec_correct_drafts_histogram: list[int]
    """Numbers of verifications that accepted 0, 1, 2, ... drafts."""


def vllm_speculation(speculation: Speculation) -> VllmSpeculation | None:
    """None if no cycle had a tree."""
    accept_length = speculation.tree_accept_length
    if accept_length is None:
        return None
    return VllmSpeculation(
        mean_acceptance_length=round(accept_length, 4),
        draft_acceptance_rate=round(speculation.accept_rate, 4),
        acceptance_histogram=acceptance_histogram(speculation),
        num_spec_steps=len(speculation.with_tree),
        num_accepted_draft_tokens=speculation.accepted_drafts,
        num_draft_tokens=speculation.proposed_drafts,
        **by_source(speculation),
    )


def sglang_speculation(speculation: Speculation) -> SglangSpeculation:
    return SglangSpeculation(
        spec_verify_ct=speculation.verify_count,
        spec_accept_length=round(speculation.accept_length, 4),
        spec_accept_rate=round(speculation.accept_rate, 4),
        spec_num_correct_drafts=speculation.accepted_drafts,
        spec_num_proposed_drafts=speculation.proposed_drafts,
        spec_correct_drafts_histogram=acceptance_histogram(speculation),
        **by_source(speculation),
    )


def by_source(speculation: Speculation) -> dict[str, dict[str, int]]:
    """The fields of MergedDrafts: none if there is nothing to tell."""
    counts = speculation.accepted_by_source
    return {"accepted_drafts_by_source": counts} if counts else {}


def acceptance_histogram(speculation: Speculation) -> list[int]:
    """Numbers of cycles with a tree that accepted and emitted 0, 1, 2, ... drafts."""
    counts = [0] * (1 + max((cycle.num_steps for cycle in speculation.with_tree), default=0))
    for cycle in speculation.with_tree:
        counts[cycle.accepted] += 1
    return counts
