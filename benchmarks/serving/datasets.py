"""Where prompts come from: real ones, since speculation drafts real text best, or random tokens of given lengths."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxspec.commands.common import BUILT_IN, PromptSet, load_prompts
from jaxspec.demo.corpus import heldout_prompts

from ..options import BenchmarkError
from .answers import Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OUTPUT_LEN = 128
BUILT_IN_PROMPTS = 64
MOST_PROMPTS = 1000
"""Of a file, unless more are asked for; the other tools' default."""
DEMO_MODEL = "jaxspec-demo"
DEMO_TOKENIZER = Path(__file__).parents[2] / "jaxspec" / "demo" / "target"
LEAST_TOKENS, MOST_PROMPT_TOKENS, MOST_TOKENS = 4, 1024, 2048
"""Of the conversations of ShareGPT: the other tools leave out what is shorter or longer."""


@dataclass(frozen=True)
class Wanted:
    """What the options say about the prompts."""

    name: str
    path: Path | None
    count: int | None
    extra: int
    """Requests more, for warming up: other prompts than those that are measured, if there are so many."""
    output_len: int | None
    input_len: int
    range_ratio: float
    context_len: int | None
    seed: int
    shuffle: bool
    tokenizer: Path | None
    text_only: bool
    """Chat has no token ids for prompts."""


class Workload(NamedTuple):
    """What a run sends."""

    source: str
    requests: list[Request]
    extra: list[Request]

    @property
    def prompts(self) -> PromptSet:
        """What is recorded about the prompts."""
        return PromptSet(self.source, [request.prompt for request in self.requests])


def load(wanted: Wanted, model: str) -> Workload:
    """The requests of a run. Raises ValueError if the data can't be had, and BenchmarkError if a tokenizer is missing."""
    match wanted.name:
        case "built-in":
            count = BUILT_IN_PROMPTS if wanted.count is None else wanted.count
            output_len = wanted.output_len or OUTPUT_LEN
            # In their own order, so that seed 0 has the prompts of the other benchmarks.
            found = [Request(prompt, output_len) for prompt in heldout_prompts(count + wanted.extra, seed=wanted.seed)]
            return split(BUILT_IN, found, count, wanted.extra)
        case "random":
            count = MOST_PROMPTS if wanted.count is None else wanted.count
            return split(f"random, about {wanted.input_len} tokens", random_requests(wanted, model, count), count, wanted.extra)
        case "sharegpt":
            requests = sharegpt_requests(wanted, model)
        case _:
            requests = [plain_request(prompt, wanted) for prompt in load_prompts(required(wanted), None).prompts]
    if wanted.shuffle:
        random.Random(wanted.seed).shuffle(requests)
    count = min(len(requests), MOST_PROMPTS) if wanted.count is None else wanted.count
    if len(requests) < count or not requests:
        raise ValueError(f"{required(wanted)} has {len(requests)} usable prompts, {count} were asked for: lower --num-prompts")
    return split(required(wanted).name, requests, count, wanted.extra)


def split(source: str, requests: list[Request], count: int, extra: int) -> Workload:
    """The first are measured and the next ones are extra; where those are missing, the first ones again."""
    others = requests[count : count + extra]
    return Workload(source, requests[:count], [(others or requests)[index % len(others or requests)] for index in range(extra)])


def required(wanted: Wanted) -> Path:
    if wanted.path is None:
        raise ValueError(f"the dataset {wanted.name} is a file of yours: give --dataset-path")
    return wanted.path


def plain_request(prompt: str | Sequence[int], wanted: Wanted) -> Request:
    if isinstance(prompt, str):
        return Request(prompt, wanted.output_len or OUTPUT_LEN)
    if wanted.text_only:
        raise ValueError("chat takes text, but a prompt is a list of token ids: use --backend openai or sglang")
    return Request(list(prompt), wanted.output_len or OUTPUT_LEN)


def sharegpt_requests(wanted: Wanted, model: str) -> list[Request]:
    """A conversation's first two turns: the first is the prompt, the second says how long the answer was."""
    path = required(wanted)
    try:
        conversations = json.loads(path.read_text())
        turns = [[turn["value"] for turn in each.get("conversations", each.get("conversation", []))[:2]] for each in conversations]
    except OSError as error:
        raise ValueError(f"can't read the conversations: {error}") from None
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        expected = 'a JSON list of objects with "conversations", a list of turns with "value"'
        raise ValueError(f"{path.name} is not ShareGPT's: expected {expected} ({type(error).__name__}: {error})") from None
    pairs = [(pair[0], pair[1]) for pair in turns if len(pair) == 2]
    if wanted.output_len is not None and wanted.tokenizer is None and model != DEMO_MODEL:
        return [Request(prompt, wanted.output_len) for prompt, _ in pairs]
    tokenizer, most = load_tokenizer(wanted.tokenizer, model, "or --sharegpt-output-len"), wanted.context_len or MOST_TOKENS
    requests = []
    for prompt, answer in pairs:
        prompt_tokens = len(tokenizer.encode(prompt).ids)
        output_len = wanted.output_len or len(tokenizer.encode(answer, add_special_tokens=False).ids)
        long_enough = prompt_tokens >= LEAST_TOKENS and (wanted.output_len is not None or output_len >= LEAST_TOKENS)
        if long_enough and prompt_tokens <= MOST_PROMPT_TOKENS and prompt_tokens + output_len <= most:
            requests.append(Request(prompt, output_len))
    return requests


def random_requests(wanted: Wanted, model: str, count: int) -> list[Request]:
    """Prompts of random tokens. As ids their length is exact; chat gets their text, which may have a few tokens more or less."""
    tokenizer = load_tokenizer(wanted.tokenizer, model, "the directory of the served model")
    special = set(tokenizer.get_added_tokens_decoder())
    ids = [token for token in range(tokenizer.get_vocab_size()) if token not in special]
    generator = random.Random(wanted.seed)

    def length(mean: int) -> int:
        least, most = math.floor(mean * (1 - wanted.range_ratio)), math.ceil(mean * (1 + wanted.range_ratio))
        return generator.randint(max(1, least), most)

    requests = []
    for _ in range(count + wanted.extra):
        prompt = generator.choices(ids, k=length(wanted.input_len))
        output_len = length(wanted.output_len or OUTPUT_LEN)
        requests.append(Request(tokenizer.decode(prompt) if wanted.text_only else prompt, output_len))
    return requests


def load_tokenizer(directory: Path | None, model: str, otherwise: str) -> "Tokenizer":
    """The tokenizer.json of a model directory, or of the built-in model if that is served."""
    from tokenizers import Tokenizer

    if directory is None and model == DEMO_MODEL:
        directory = DEMO_TOKENIZER
    if directory is None:
        raise BenchmarkError(f"this dataset needs the model's tokenizer to count tokens: give --tokenizer DIR, {otherwise}")
    file = directory / "tokenizer.json" if directory.is_dir() else directory
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        raise BenchmarkError(f"--tokenizer: can't read {file}, expected a model directory with tokenizer.json ({error})") from None
