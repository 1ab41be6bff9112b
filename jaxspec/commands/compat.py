"""Compatibility with SGLang's and vLLM's launch commands: flags without effect here, and vLLM's --speculative-config."""

import argparse
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxspec.checks import Check, Flag, Number, Text, Whole
from jaxspec.commands.compat_defaults import DEFAULTS
from jaxspec.commands.options import Parser
from jaxspec.defaults import FROM_TEXT, NGRAM
from jaxspec.server.kv_events import FLAG as KV_EVENTS_FLAG
from jaxspec.tree_shape import TreeShape


class Ignored(NamedTuple):
    """Flags without effect that share one sentence. They are accepted and reported in the log."""

    names: str
    """Separated by spaces. Those with = take a value, those with =... several, and those with =this|that one of these: any other
    would change something, and is refused. '' is the empty value."""
    instead: str
    """The reason; it ends the sentence "--name has no effect: "."""


NO_GRAPHS = "programs for batches of up to --max-running-requests requests are compiled ahead"
XLA = "XLA compiles every program"
ATTENTION = "jaxspec has its own attention kernels (--attention-kernel)"
ONE_DEVICE = "--tp-size devices run the model, in one process on each of --nnodes hosts"
ACCESS_LOG = "the log has one line per request"
SCHEDULING = "requests are served by priority and arrival, and preempted when the cache is full"
CHUNKS = "prompts are always computed in chunks, alongside decoding"
ONE_AHEAD = "the host runs one cycle ahead unless --disable-overlap-schedule is given"
GRAMMARS = "llguidance follows all grammars"
TEXT = "every cycle searches all of the request's own text, without a trie"

IGNORED = (
    Ignored("--cuda-graph-max-bs= --cuda-graph-bs=... --disable-cuda-graph --disable-cuda-graph-padding", NO_GRAPHS),
    Ignored("--enable-piecewise-cuda-graph --disable-piecewise-cuda-graph --max-seq-len-to-capture=", NO_GRAPHS),
    Ignored("--enforce-eager --enable-torch-compile --torch-compile-max-bs= --compilation-config= -O=", XLA),
    Ignored("--attention-backend= --prefill-attention-backend= --decode-attention-backend=", ATTENTION),
    Ignored("--speculative-attention-mode= --speculative-draft-attention-backend= --triton-attention-num-kv-splits=", ATTENTION),
    Ignored("--triton-attention-reduce-in-fp32 --disable-cascade-attn --enable-flashinfer-mla --enable-flashmla", ATTENTION),
    Ignored("--speculative-ngram-min-bfs-breadth= --speculative-ngram-max-bfs-breadth= --speculative-ngram-match-type=", TEXT),
    Ignored("--speculative-ngram-max-trie-depth= --speculative-ngram-branch-length= --speculative-ngram-capacity=", TEXT),
    Ignored("--sampling-backend=", "sampling is part of the compiled cycle"),
    Ignored("--grammar-backend= --guided-decoding-backend= --disable-outlines-disk-cache", GRAMMARS),
    Ignored("--enable-auto-tool-choice", "models may call tools wherever the format of calls is known (--tool-call-parser)"),
    Ignored("--trust-remote-code", "code from a model directory is never run, and the supported models need none"),
    Ignored("--dist-timeout= --nccl-port= --distributed-executor-backend=", ONE_DEVICE),
    Ignored("--disable-custom-all-reduce --enable-p2p-check --disable-frontend-multiprocessing", ONE_DEVICE),
    Ignored("--device=", "JAX uses the device that it finds (JAX_PLATFORMS=cpu selects the CPU)"),
    Ignored("--disable-fast-image-processor", "models take text only"),
    Ignored("--schedule-policy= --schedule-conservativeness= --scheduling-policy= --swap-space=", SCHEDULING),
    Ignored("--enable-chunked-prefill --enable-mixed-chunk --max-prefill-tokens= --prefill-max-requests=", CHUNKS),
    Ignored("--enable-prefix-caching", "prompts with a common beginning share pages unless --disable-radix-cache is given"),
    Ignored("--async-scheduling --num-continuous-decode-steps= --num-scheduler-steps=", ONE_AHEAD),
    Ignored("--stream-interval=", "streams receive their tokens after every cycle"),
    Ignored("--skip-server-warmup --warmups=", "the warm-up is compilation: see --compile-ahead"),
    Ignored("--enable-metrics", "/metrics is always available"),
    Ignored("--enable-cache-report --enable-prompt-tokens-details", "every response reports the cached prompt tokens"),
    Ignored("--log-requests --enable-log-requests --log-requests-level= --max-log-len=", "prompts and texts are never logged"),
    Ignored("--disable-log-requests --no-enable-log-requests", "prompts and texts are never logged"),
    Ignored("--log-level-http= --uvicorn-log-level=", "--log-level applies to all lines"),
    Ignored("--disable-uvicorn-access-log --disable-access-log", ACCESS_LOG),
    Ignored(
        "--show-time-cost --decode-log-interval= --disable-log-stats", "a line of statistics is logged every five seconds of work"
    ),
    Ignored("--watchdog-timeout=", "there is no watchdog; /health reports whether the engine works"),
    Ignored("--sleep-on-idle --use-uvloop", "an idle engine waits without using the CPU"),
    Ignored("--enable-request-id-headers", "every response has its x-request-id"),
    *(Ignored(names, why) for why, names in DEFAULTS.items()),
)


class _Ignore(argparse.Action):
    """Adds a sentence to the namespace's `ignored`; refuses a value that would change something."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, instead: str, only: Sequence[str], **settings: Any):
        super().__init__(option_strings, dest, **settings)
        self._instead, self._only = instead, only

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, name: str | None = None
    ) -> None:
        if self._only and not any(same_value(values, each) for each in self._only):
            only = " or ".join(each or "the empty text" for each in self._only)
            parser.error(f"{name} {values!s:.80} is not supported: only {only} is ({self._instead})")
        sentence = f"{name} has no effect: {self._instead}"
        if sentence not in namespace.ignored:
            namespace.ignored = (*namespace.ignored, sentence)


def same_value(given: str, accepted: str) -> bool:
    """Whether two texts mean the same: 2 is 2.0."""
    try:
        return float(given) == float(accepted)
    except ValueError:
        return given == accepted


def add_ignored(parser: Parser) -> None:
    """The flags of the table. They don't show in the help."""
    parser.set_defaults(ignored=())
    for group in IGNORED:
        for spelling in group.names.split():
            name, takes, values = spelling.partition("=")
            settings: dict[str, Any] = {
                "action": _Ignore,
                "instead": group.instead,
                "only": accepted_values(values),
                "nargs": "+" if values == "..." else None if takes else 0,
                "dest": "ignored",
                "default": argparse.SUPPRESS,
            }
            parser.add_argument(name, help=argparse.SUPPRESS, **settings)


def accepted_values(notation: str) -> list[str]:
    """The values after the = of a flag in `Ignored.names`; [] if it takes any.

    In:  "auto|''"
    Out: ["auto", ""]
    """
    return [] if notation in ("", "...") else [value.strip("'") for value in notation.split("|")]


def list_ignored(word: str = "") -> str:
    """Help text of the flags without effect, or of those that contain the word. Empty if none does."""
    lines = []
    for group in IGNORED:
        names = [name.removesuffix("...").removesuffix("=") for name in group.names.split()]
        if word.lower() in f"{' '.join(names)} {group.instead}".lower():
            lines.append(f"  {', '.join(names)}\n      {group.instead}")
    return "\n".join(lines)


METHODS = {
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "mimo_mtp": "NEXTN",
    "dflash": "DFLASH",
    "dspark": "DSPARK",
    "draft_model": "STANDALONE",
    "ngram": NGRAM,
    "suffix": NGRAM,
}
"""vLLM's names of draft sources, and SGLang's names for them."""
LOOKUPS = {"prompt_lookup_min": "ngram_min_match", "prompt_lookup_max": "ngram_max_match"}
"""vLLM's names of fields of EngineConfig."""
TEXT_NAMES = (FROM_TEXT, f"[{FROM_TEXT}]")
"""What is given, as in vLLM, instead of a draft's name if drafts come from the text itself."""
DRAFT_DEVICES, EAGER = "draft_tensor_parallel_size", "enforce_eager"
OF_SUFFIX: dict[str, Check] = {
    "suffix_decoding_max_tree_depth": Whole(1),
    "suffix_decoding_max_cached_requests": Whole(0),
    "suffix_decoding_max_spec_factor": Number(0, 1e6),
    "suffix_decoding_min_token_prob": Number(0, 1),
}
"""vLLM's settings for suffix decoding's trees: accepted without effect."""
KEYS = ("method", "model", "revision", "num_speculative_tokens", DRAFT_DEVICES, EAGER, *LOOKUPS, *OF_SUFFIX)
FLAG = "--speculative-config"
JSON_FLAGS = (FLAG, KV_EVENTS_FLAG)
"""In a config file their value is a mapping."""


class SpeculativeConfig(NamedTuple):
    """Which drafts and which tree a command line asks for; None: not said."""

    algorithm: str | None
    draft: str | None
    tree: TreeShape | None
    revision: str | None = None
    """The draft's revision on the Hub."""
    engine: Mapping[str, int | bool] = MappingProxyType({})
    """Fields of EngineConfig."""
    notes: tuple[str, ...] = ()
    """What was given without effect, for the log."""


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """The JSON of --speculative-config, checked. The tree is a chain, the only kind that vLLM drafts. For suffix the default
    tree is ours: a chain of vLLM's 24 would be verified in every cycle, whatever was found. Raises ValueError, naming the key.

    In:  '{"method": "eagle3", "model": "head", "num_speculative_tokens": 3}'
    Out: algorithm "EAGLE3", draft "head", tree 3/1/4
    """
    try:
        given = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{FLAG} must be JSON, got {text[:80]!r}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{FLAG} must be a JSON object, got {text[:80]!r}")
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        raise ValueError(f"{FLAG} has {unknown[0][:80]!r}, which is not supported; supported: {', '.join(KEYS)}")
    if given.get(DRAFT_DEVICES) is not None:  # devices share the head as they share the target
        Whole(1).clean(f"{FLAG}: {DRAFT_DEVICES}", given[DRAFT_DEVICES])
    texts = {key: Text().clean(f"{FLAG}: {key}", given[key]) for key in KEYS[:3] if given.get(key) is not None}
    method, draft, revision = (texts.get(key) for key in KEYS[:3])
    if method is not None and method not in METHODS:
        raise ValueError(f"{FLAG}: method must be one of {', '.join(METHODS)}, got {method[:80]!r}")
    if method is None and draft in TEXT_NAMES:
        method = FROM_TEXT
    steps, algorithm = given.get("num_speculative_tokens"), None if method is None else METHODS[method]
    has_default = method == "suffix" and steps is None
    tree = None if has_default else TreeShape(Whole(1).clean(f"{FLAG}: num_speculative_tokens", steps), 1)
    of_suffix = [name for name in OF_SUFFIX if given.get(name) is not None]
    for name in of_suffix:
        OF_SUFFIX[name].clean(f"{FLAG}: {name}", given[name])
    if of_suffix and method != "suffix":
        raise ValueError(f"{FLAG}: {of_suffix[0]} is for the method suffix: leave it out")
    why = f"has no effect: {TEXT} (--speculative-ngram-share adds those of other requests)"
    notes = tuple(f"{FLAG}: {name} {why}" for name in of_suffix)
    if given.get(EAGER) is not None and Flag().clean(f"{FLAG}: {EAGER}", given[EAGER]):
        notes += (f"{FLAG}: {EAGER} has no effect: {XLA}",)
    lookups = [name for name in LOOKUPS if given.get(name) is not None]
    if algorithm != NGRAM:
        if lookups:
            raise ValueError(f"{FLAG}: {lookups[0]} is for the method ngram: leave it out")
        return SpeculativeConfig(algorithm, draft, tree, revision, notes=notes)
    for key, value in (("model", draft if draft not in (method, *TEXT_NAMES) else None), ("revision", revision)):
        if value is not None:
            raise ValueError(f"{FLAG}: {method} drafts from the text: leave out {key}")
    matches = {LOOKUPS[name]: Whole(1).clean(f"{FLAG}: {name}", given[name]) for name in lookups}
    return SpeculativeConfig(NGRAM, FROM_TEXT, tree, None, {"ngram": True, **matches}, notes)
