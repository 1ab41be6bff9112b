"""What the server says about itself, and about the acceptance of drafts during the run."""

import re
from pathlib import PurePath
from typing import Any, NamedTuple

from .answers import FailedRequest
from .client import Client

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
DESCRIBING = (
    "version", "tree", "speculative_trees", "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "context_length", "max_total_num_tokens", "max_running_requests", "dtype", "tp_size",
)  # fmt: skip
"""Fields of /server_info that are worth recording. It has more, keys and paths among them, which nobody should publish."""


class Drafting(NamedTuple):
    """The counters at one time, over all engines of the server."""

    drafts: float
    draft_tokens: float
    accepted_tokens: float
    per_position: dict[int, float]


def parse_metrics(text: str) -> Drafting | None:
    """vLLM's counters in a page of Prometheus; None if it has none."""
    sums = dict.fromkeys(COUNTERS, 0.0)
    per_position: dict[int, float] = {}
    found = set()
    for name, labels, value in SAMPLE.findall(text):
        for ours, theirs in COUNTERS.items():
            if name == theirs:
                sums[ours] += float(value)
                found.add(ours)
        if name == PER_POSITION and (position := POSITION.search(labels)):
            number = int(position[1])
            per_position[number] = per_position.get(number, 0.0) + float(value)
    return Drafting(**sums, per_position=per_position) if len(found) == len(COUNTERS) else None


async def drafting(client: Client) -> Drafting | None:
    """The counters now; None: the server shows none."""
    try:
        return parse_metrics(await client.get("/metrics"))
    except (FailedRequest, ValueError):
        return None


async def server_info(client: Client) -> dict[str, Any]:
    """The server's /server_info; empty if it has none."""
    try:
        info = await client.get_json("/server_info")
    except FailedRequest:
        return {}
    return info if isinstance(info, dict) else {}


async def describe(client: Client) -> dict[str, Any]:
    """What can be recorded about the server."""
    info = await server_info(client)
    known = {name: info[name] for name in DESCRIBING if isinstance(info.get(name), str | int | float | list)}
    if "version" not in known:
        try:
            version = await client.get_json("/version")
            known |= {"version": str(version["version"])}
        except (FailedRequest, KeyError, TypeError):
            pass
    return known


async def acceptance(client: Client, before: Drafting | None) -> dict[str, Any] | None:
    """Accept length since `before`, and where that number is from. None: the server does not say."""
    after = await drafting(client)
    if before is not None and after is not None and (counted := since(before, after)) is not None:
        return counted
    states = (await server_info(client)).get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    length = state.get("avg_spec_accept_length")
    if not isinstance(length, int | float) or (before is not None and after is not None):
        return None  # counters that stood still: nothing was drafted in this run, whatever was before
    return {
        "accept_length": float(length),
        "source": "/server_info, since the server's start or its last flush, not this run alone",
    }


def since(before: Drafting, after: Drafting) -> dict[str, Any] | None:
    """What the counters say about the time between; None if nothing was drafted, or the server was started anew."""
    drafts, accepted = after.drafts - before.drafts, after.accepted_tokens - before.accepted_tokens
    draft_tokens = after.draft_tokens - before.draft_tokens
    if drafts <= 0 or accepted < 0 or draft_tokens < 0:
        return None
    rates = [(after.per_position[each] - before.per_position.get(each, 0.0)) / drafts for each in sorted(after.per_position)]
    return {
        "accept_length": 1 + accepted / drafts,
        "draft_acceptance_rate": accepted / draft_tokens if draft_tokens else None,
        "acceptance_rate_per_position": rates,
        "drafts": int(drafts),
        "draft_tokens": int(draft_tokens),
        "accepted_tokens": int(accepted),
        "source": "/metrics, vllm:spec_decode_* counters over this run",
    }


def without_directory(model: str) -> str:
    """A model's name; servers that were given none tell their path instead."""
    return PurePath(model).name if model.startswith("/") else model
