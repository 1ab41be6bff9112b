"""`jaxspec train data`: conversations whose answers the target writes itself, in its own words and its own tokens.

With prompts, their user turns are answered again; topics.toml makes some. Without any, the target writes the users' turns too:
behind the beginning of its chat template it invents what a user might ask (Magpie, arXiv 2406.08464).
"""

import hashlib
import json
import os
import random
import re
import tomllib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, Self

from tqdm import tqdm

from jaxspec.chat_template import ChatTemplate
from jaxspec.engine.request import GenerationOutput
from jaxspec.llm import LLM
from jaxspec.sampling_params import SamplingParams
from jaxspec.train.settings import DataSettings

SETTINGS = "settings.json"
HERE = "<<<the user's turn>>>"
"""Stands for a user's text, to find where the template puts it."""
LEAST_USER_TOKENS = 3
CUT = 32
"""Tokens that a repetitive answer loses at a time."""
LEAST_ROOM = 16
"""Tokens that a turn can still have; a conversation with less room has ended."""
REPETITIVE = 0.3
"""Of the size that zlib leaves of a text. English prose is near 0.5; a sentence said over and over is below 0.2."""
ASSISTANT, USER = "assistant", "user"
TOPICS = Path(__file__).parent / "topics.toml"
TRIES = 10
"""Prompts that are made for each one that is new."""


class Conversation(NamedTuple):
    """A rendered conversation. In: tokens [9, 8, 7, 6, 5], answers [(3, 5)]. The target wrote tokens 6 and 5."""

    tokens: list[int]
    answers: list[tuple[int, int]]
    """Where each answer begins and ends in tokens; its end-of-turn token is the last of it."""


type Message = dict[str, Any]


@dataclass
class Unfinished:
    """A conversation that is being written."""

    script: list[Message] = field(default_factory=list)
    """What users still say, from the file of prompts."""
    messages: list[Message] = field(default_factory=list)
    finished: Conversation | None = None
    """The messages up to the last good answer, in tokens."""


class Writer:
    """Lets the target write conversations, shard after shard. A context manager: the template has a process.

    Raises ValueError if the target has no chat template.
    """

    def __init__(self, llm: LLM, settings: DataSettings, prompts: Sequence[Sequence[Message]] | None):
        template = ChatTemplate.of_model(llm.tokenizer)
        if template is None or llm.tokenizer is None:
            raise ValueError(f"{settings.model} has no chat template, so it can't write conversations")
        self._llm, self._tokenizer, self._template = llm, llm.tokenizer, template
        self._settings, self._prompts = settings, prompts
        self._longest = min(settings.max_tokens, llm.engine.context_length)
        self._is_plain = template.render([{"role": USER, "content": HERE}]).startswith(HERE)
        """The template marks no turns: it is a model that goes on with a text, and its users break off anywhere."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._template.close()

    def shard(self, number: int) -> list[Conversation]:
        """The conversations of one shard. Turns that repeat themselves or break off end theirs early."""
        settings, chance = self._settings, random.Random(f"{self._settings.seed} {number}")
        first = number * settings.per_shard
        if self._prompts is None:
            unfinished = [Unfinished() for _ in range(settings.per_shard)]
        else:
            given = self._prompts[first : first + settings.per_shard]
            unfinished = [Unfinished([message for message in each if message["role"] != ASSISTANT]) for each in given]
        active = unfinished
        for turn in range(settings.max_turns if self._prompts is None else max(len(each.script) for each in unfinished)):
            if self._prompts is None:
                active = self._invent([each for each in active if turn == 0 or chance.random() < settings.more_turns], chance)
            else:
                active = [each for each in active if spoken(each)]
            active = self._answer(active, chance)
        return [each.finished for each in unfinished if each.finished is not None]

    def _invent(self, unfinished: list[Unfinished], chance: random.Random) -> list[Unfinished]:
        """Adds a user's turn as the target imagines it. Out: the unfinished that got a proper one."""
        asked = [{"role": USER, "content": HERE}]
        if self._is_plain:
            unfinished = [each for each in unfinished if not each.messages]  # they have one turn, which begins a text
            start = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id, 0)
            beginnings = [[next(token for token in start if token is not None)] for _ in unfinished]
        else:
            beginnings = [self._encode(self._template.render([*each.messages, *asked]).split(HERE)[0]) for each in unfinished]
        unfinished, beginnings = self._with_room(unfinished, beginnings)
        outputs = self._generate(beginnings, self._settings.max_user_tokens, [1.0] * len(unfinished), chance)
        invented = []
        for each, output in zip(unfinished, outputs, strict=True):
            text = output.text.strip()
            is_whole = output.finish_reason == "stop" or self._is_plain
            if is_whole and len(output.token_ids) > LEAST_USER_TOKENS and not is_repetitive(text):
                each.messages.append({"role": USER, "content": text})
                invented.append(each)
        return invented

    def _answer(self, unfinished: list[Unfinished], chance: random.Random) -> list[Unfinished]:
        """Adds the target's answer, up to where it repeats itself. Out: the unfinished that got a whole one."""
        prompts = [self._encode(self._template.render(each.messages)) for each in unfinished]
        unfinished, prompts = self._with_room(unfinished, prompts)
        temperatures = [chance.choice(self._settings.temperatures) for _ in unfinished]
        outputs = self._generate(prompts, self._settings.max_answer_tokens, temperatures, chance)
        answered = []
        for each, prompt, output in zip(unfinished, prompts, outputs, strict=True):
            before = each.finished or Conversation([], [])
            good = self._before_it_repeats(list(output.token_ids))
            if not good or prompt[: len(before.tokens)] != before.tokens:
                continue  # or its text has other tokens when read again
            each.finished = Conversation([*prompt, *good], [*before.answers, (len(prompt), len(prompt) + len(good))])
            each.messages.append({"role": ASSISTANT, "content": output.text})
            if output.finish_reason == "stop" and len(good) == len(output.token_ids):
                answered.append(each)
        return answered

    def _with_room(self, unfinished: list[Unfinished], prompts: list[list[int]]) -> tuple[list[Unfinished], list[list[int]]]:
        """Those whose prompts leave room for some tokens more."""
        fits = [len(prompt) + LEAST_ROOM <= self._longest for prompt in prompts]
        return list(compress(unfinished, fits)), list(compress(prompts, fits))

    def _generate(
        self, prompts: list[list[int]], max_tokens: int, temperatures: list[float], chance: random.Random
    ) -> list[GenerationOutput]:
        params = [
            SamplingParams(
                temperature=temperature,
                top_p=0.95 if temperature else 1.0,
                seed=chance.getrandbits(31),
                max_tokens=min(max_tokens, self._longest - len(prompt)),
            )
            for prompt, temperature in zip(prompts, temperatures, strict=True)
        ]
        outputs: dict[int, GenerationOutput] = {}
        for is_sampled in (False, True):  # apart: one sampled request makes a whole batch draw noise
            chosen = [index for index, each in enumerate(params) if (each.temperature > 0) == is_sampled]
            found = self._llm.generate([prompts[index] for index in chosen], [params[index] for index in chosen])
            outputs |= dict(zip(chosen, found, strict=True))
        return [outputs[index] for index in range(len(prompts))]

    def _before_it_repeats(self, tokens: list[int]) -> list[int]:
        """An answer, or as much of it as does not say the same over and over."""
        while tokens and is_repetitive(str(self._tokenizer.decode(tokens))):
            tokens = tokens[: (len(tokens) - 1) // CUT * CUT]
        return tokens

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def spoken(each: Unfinished) -> bool:
    """Moves messages of the script into the conversation, up to the next user's turn; False if there is none."""
    while each.script:
        each.messages.append(each.script.pop(0))
        if each.messages[-1]["role"] == USER:
            return True
    return False


def is_repetitive(text: str) -> bool:
    """Whether a text of some length says the same over and over."""
    raw = text.encode()
    return len(raw) >= 200 and len(zlib.compress(raw)) < REPETITIVE * len(raw)


def topic_prompts(count: int, seed: int, settings: DataSettings) -> list[list[Message]]:
    """What users of a chat model might ask, made of the templates and words in topics.toml; no two begin alike.

    More prompts are the same and some more. Raises ValueError if the templates don't make so many.
    """
    book, chance = tomllib.loads(TOPICS.read_text(encoding="utf-8")), random.Random(seed)
    kinds, shares = list(book["kinds"].values()), [kind["share"] for kind in book["kinds"].values()]

    def filled(templates: list[str]) -> Message:
        return user_says(re.sub(r"{(\w+)}", lambda slot: chance.choice(book["words"][slot[1]]), chance.choice(templates)))

    found: dict[str, list[Message]] = {}
    for _ in range(TRIES * count):
        (kind,) = chance.choices(kinds, shares)
        turns = [filled(kind["prompts"])]
        while len(turns) < settings.max_turns and chance.random() < settings.more_turns:
            turns.append(filled(kind["then"]))
        found.setdefault(turns[0]["content"], turns)
        if len(found) == count:
            return list(found.values())
    raise ValueError(
        f"{TOPICS.name} makes about {len(found)} prompts, {count} are needed: give a file of your own, or fewer shards"
    )


def read_prompts(file: Path) -> list[list[Message]]:
    """Conversations of a JSONL file: {"messages": [...]} (OpenAI), {"conversations": [{"from", "value"}]} (ShareGPT) or
    {"prompt": "..."}; or of a text file, one prompt per line.

    Raises ValueError that names the line.
    """
    conversations = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if line := line.strip():
            try:
                conversations.append(_messages(json.loads(line)) if file.suffix in (".jsonl", ".json") else [user_says(line)])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{file}, line {number}: expected messages, conversations or prompt in a JSON object: {error}"
                ) from None
    if not conversations:
        raise ValueError(f"{file} holds no prompts")
    return conversations


ROLES = {"human": USER, "user": USER, "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}
"""ShareGPT's names for those who speak."""


def _messages(entry: dict[str, Any]) -> list[Message]:
    if "prompt" in entry:
        return [user_says(_text_of(entry["prompt"]))]
    turns = entry.get("messages") or [{"role": each["from"], "content": each["value"]} for each in entry["conversations"]]
    messages = [{"role": ROLES[turn["role"]], "content": _text_of(turn["content"])} for turn in turns]
    if not any(message["role"] == USER for message in messages):
        raise ValueError("no message of a user")
    return messages


def _text_of(content: Any) -> str:
    """A message's text: OpenAI's may be a list of parts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if any(part["type"] != "text" for part in parts):
        raise ValueError("a message has other parts than text")
    return "".join(part["text"] for part in parts)


def user_says(text: str) -> Message:
    """One message."""
    return {"role": USER, "content": text}


def shard_files(folder: Path) -> list[Path]:
    """The shards of a folder, in order."""
    return sorted(folder.glob("shard-*.jsonl"))


def digest(folder: Path) -> str:
    """SHA-256 of the shards of a folder."""
    hashes = [hashlib.sha256(file.read_bytes()).digest() for file in shard_files(folder)]
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def read_shards(folder: Path) -> Iterator[Conversation]:
    """Every conversation of a folder. Raises ValueError that names a damaged line."""
    if not shard_files(folder):
        raise ValueError(f"{folder} holds no shards: write them with jaxspec train data --data {folder}")
    for file in shard_files(folder):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            try:
                entry = json.loads(line)
                tokens, answers = [int(token) for token in entry["tokens"]], [(int(a), int(b)) for a, b in entry["answers"]]
                if not all(0 <= a < b <= len(tokens) for a, b in answers):
                    raise ValueError("an answer lies outside its conversation")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}, line {number} is damaged ({error}): delete the file, it will be written again") from None
            yield Conversation(tokens, answers)


def write_shards(llm: LLM, settings: DataSettings, prompts: list[list[Message]] | None, out: Path, shards: int) -> None:
    """Writes the shards that a folder lacks; a shard is there whole or not at all.

    Raises ValueError if the folder holds shards of other settings.
    """
    out.mkdir(parents=True, exist_ok=True)
    described = json.loads(json.dumps(asdict(settings)))
    file = out / SETTINGS
    if file.exists() and json.loads(file.read_text()) != described:
        raise ValueError(f"{out} holds conversations of other settings, see {file}: give another folder")
    write_file(file, json.dumps(described, indent=2) + "\n")
    missing = [number for number in range(shards) if not (out / f"shard-{number:05}.jsonl").exists()]
    with Writer(llm, settings, prompts) as writer, tqdm(missing, desc="shards", unit="shard") as bar:
        for number in bar:
            conversations = writer.shard(number)
            lines = [json.dumps(conversation._asdict()) for conversation in conversations]
            write_file(out / f"shard-{number:05}.jsonl", "".join(line + "\n" for line in lines))
            bar.set_postfix(answer_tokens=sum(end - start for each in conversations for start, end in each.answers))


def write_file(file: Path, text: str) -> None:
    """Replaces a file in one step."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, file)
