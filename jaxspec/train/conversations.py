"""`jaxspec train data`: conversations whose answers the target writes itself, in its own words and its own tokens.

With prompts, the target answers their user turns anew; topics.toml has templates for some. Without prompts it writes the user turns
too: given only the start of its chat template, it invents what a user might ask (Magpie, arXiv 2406.08464).
"""

import hashlib
import json
import os
import random
import re
import tomllib
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from tqdm import tqdm

from jaxspec.commands.common import text_lines
from jaxspec.engine.request import GenerationOutput, GenerationRequest
from jaxspec.load import LoadedModels
from jaxspec.models.registry import LoadedHead, LoadedTarget
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.chat_template import ChatTemplate, RenderError
from jaxspec.train.settings import DataSettings

SETTINGS = "settings.json"
HERE = "<<<the user's turn>>>"
"""Stands for a user's text, to find where the template puts it."""
LEAST_USER_TOKENS = 3
CUT = 32
"""A repetitive answer is shortened to smaller and smaller multiples of this many tokens."""
LEAST_ROOM = 16
"""The fewest tokens of room that a turn needs; with less, the conversation ends."""
REPETITIVE = 0.3
"""Text is repetitive if zlib compresses it to less than this share of its size. English prose is near 0.5; a sentence repeated over
and over is below 0.2."""
ASSISTANT, USER = "assistant", "user"
TOPICS = Path(__file__).parent / "topics.toml"
TRIES = 10
"""Attempts allowed per requested prompt, since the templates also produce duplicates."""


class Conversation(NamedTuple):
    """A rendered conversation. In: tokens [9, 8, 7, 6, 5], answers [(3, 5)]. The target wrote tokens 6 and 5."""

    tokens: list[int]
    answers: list[tuple[int, int]]
    """Where each answer begins and ends in tokens; its end-of-turn token is the last of it."""
    is_plain: bool = False
    """A base model's text: what stands before the answer is like what comes after it, so that all of it is learnt."""

    def learnt(self) -> list[tuple[int, int]]:
        """Where the text to learn from begins and ends."""
        return [(0, len(self.tokens))] if self.is_plain else self.answers


type Message = dict[str, Any]
type Writing[T] = Generator[GenerationRequest, GenerationOutput, T]
"""A generator that writes a conversation: it yields questions, is sent the target's outputs, and returns its result."""


class Writer:
    """Lets the target write conversations, shard after shard. A context manager: the template has a process.

    Raises ValueError if the target has no chat template.
    """

    def __init__(self, models: LoadedModels, settings: DataSettings, prompts: Sequence[Sequence[Message]] | None):
        template = ChatTemplate.of_model(models.tokenizer)
        if template is None or models.tokenizer is None:
            raise ValueError(f"{settings.model} has no chat template, so it can't write conversations")
        self._engine, self._tokenizer, self._template = models.engine, models.tokenizer, template
        self._settings, self._prompts = settings, prompts
        self._longest = min(settings.max_tokens, models.engine.context_length)
        self._is_plain = template.render([{"role": USER, "content": HERE}]).startswith(HERE)
        """The template marks no turns: a base model, which only continues text, so its user turns may break off anywhere."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._template.close()

    def shard(self, number: int) -> list[Conversation]:
        """The conversations of one shard."""
        size, seed = self._settings.per_shard, f"{self._settings.seed} {number}"
        scripts: Sequence[Sequence[Message] | None] = [None] * size
        if self._prompts is not None:
            scripts = self._prompts[number * size : (number + 1) * size]
        writings = [self._guarded(script, number * size + index, f"{seed} {index}") for index, script in enumerate(scripts)]
        return self._run(writings)

    def _run(self, writings: Sequence[Writing[Conversation | None]]) -> list[Conversation]:
        """Writes all of them, as many at once as the engine takes. Greedy and sampled questions are queued apart, to mix them as
        little as possible: one sampled request makes a whole batch draw noise."""
        waiting: dict[bool, deque[tuple[int, GenerationRequest]]] = {False: deque(), True: deque()}
        running: dict[str, int] = {}
        written: dict[int, Conversation] = {}

        def go_on(number: int, output: GenerationOutput | None) -> None:
            try:
                question = next(writings[number]) if output is None else writings[number].send(output)
            except StopIteration as end:
                if end.value is not None:
                    written[number] = end.value
            else:
                waiting[question.params.temperature > 0].append((number, question))

        for number in range(len(writings)):
            go_on(number, None)
        is_sampled = False
        while running or any(waiting.values()):
            if not waiting[is_sampled]:
                is_sampled = not is_sampled
            while waiting[is_sampled] and len(running) < self._engine.config.max_running_requests:
                number, question = waiting[is_sampled].popleft()
                running[self._engine.add(question).id] = number
            for update in self._engine.step():
                if update.output is not None:
                    if update.output.finish_reason == "error":
                        raise ValueError(f"the engine failed, and the shard is left out: {update.output.error}")
                    go_on(running.pop(update.request_id), update.output)
        return [written[number] for number in sorted(written)]

    def _guarded(self, script: Sequence[Message] | None, number: int, seed: str) -> Writing[Conversation | None]:
        """`_write`, except that a conversation that the template refuses (for a system message, say) is reported and left out."""
        try:
            return (yield from self._write(script, random.Random(seed)))
        except RenderError as error:
            tqdm.write(f"conversation {number} is left out: {error}")
            return None

    def _write(self, script: Sequence[Message] | None, chance: random.Random) -> Writing[Conversation | None]:
        """One conversation, up to its last good answer; turns that repeat themselves or break off end it. `script`: what its users
        say; None: the target invents that."""
        settings = self._settings
        said = deque(message for message in script or () if message["role"] != ASSISTANT)
        messages: list[Message] = []
        written: Conversation | None = None
        for turn in range(settings.max_turns if script is None else len(said)):
            if script is None:
                if turn and (self._is_plain or chance.random() >= settings.more_turns):
                    return written
                text = yield from self._invent(messages, chance)
                if text is None:
                    return written
                messages.append(user_says(text))
            else:
                while said and (not messages or messages[-1]["role"] != USER):
                    messages.append(said.popleft())
            if not messages or messages[-1]["role"] != USER:
                return written
            prompt = self._encode(self._template.render(messages))
            output = yield from self._ask(prompt, settings.max_answer_tokens, chance.choice(settings.temperatures), chance)
            if output is None:
                return written
            good = list(output.token_ids)
            if not self._is_plain:  # a model that only continues text repeats itself when serving, too
                good = self._before_it_repeats(good)
            before = written or Conversation([], [])
            if not good or prompt[: len(before.tokens)] != before.tokens:
                return written  # empty, or the earlier turns were tokenized differently this time
            answers = [*before.answers, (len(prompt), len(prompt) + len(good))]
            written = Conversation([*prompt, *good], answers, self._is_plain)
            messages.append({"role": ASSISTANT, "content": output.text})
            if output.finish_reason != "stop" or len(good) < len(output.token_ids):
                return written
        return written

    def _invent(self, messages: Sequence[Message], chance: random.Random) -> Writing[str | None]:
        """The target invents a user's turn. Returns None if it breaks off, is too short or repeats itself.

        A base model's user turns start in the middle of a text: at a random line of its first half.
        """
        if self._is_plain:
            start = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id, 0)
            beginning = [next(token for token in start if token is not None)]
        else:
            beginning = self._encode(self._template.render([*messages, user_says(HERE)]).split(HERE)[0])
        output = yield from self._ask(beginning, self._settings.max_user_tokens, 1.0, chance)
        if output is None or (output.finish_reason != "stop" and not self._is_plain):
            return None
        text = output.text.strip()
        if self._is_plain:
            lines = text.split("\n")
            text = "\n".join(lines[chance.randrange((len(lines) + 1) // 2) :]).strip()
        return text if len(self._encode(text)) > LEAST_USER_TOKENS and not is_repetitive(text) else None

    def _ask(
        self, prompt: list[int], max_tokens: int, temperature: float, chance: random.Random
    ) -> Writing[GenerationOutput | None]:
        """The target's continuation of a prompt. Returns None if there is too little room for one."""
        if (room := self._longest - len(prompt)) < LEAST_ROOM:
            return None
        top_p, seed = 0.95 if temperature else 1.0, chance.getrandbits(31)
        params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=min(max_tokens, room))
        return (yield GenerationRequest(tuple(prompt), params))

    def _before_it_repeats(self, tokens: list[int]) -> list[int]:
        """An answer, or as much of it as does not say the same over and over."""
        while tokens and is_repetitive(str(self._tokenizer.decode(tokens))):
            tokens = tokens[: (len(tokens) - 1) // CUT * CUT]
        return tokens

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def is_repetitive(text: str) -> bool:
    """Whether a text of some length says the same over and over."""
    raw = text.encode()
    return len(raw) >= 200 and len(zlib.compress(raw)) < REPETITIVE * len(raw)


def topic_prompts(count: int, seed: int, settings: DataSettings) -> list[list[Message]]:
    """What users of a chat model might ask, made from the templates and words in topics.toml; their first turns all differ.

    A larger count gives the same prompts and more. Raises ValueError if the templates don't yield that many.
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

    Raises ValueError that names the line, or as `text_lines`.
    """
    conversations = []
    for number, line in enumerate(text_lines(file), 1):
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
"""Roles by their names in ShareGPT's and OpenAI's formats."""


def _messages(entry: dict[str, Any]) -> list[Message]:
    turns = entry.get("messages")
    if not turns and "conversations" in entry:
        turns = [{"role": each["from"], "content": each["value"]} for each in entry["conversations"]]
    if not turns:
        return [user_says(_text_of(entry["prompt"]))]
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
    return {"role": USER, "content": text}


def shard_files(folder: Path) -> list[Path]:
    """The shards of a folder, in order."""
    return sorted(folder.glob("shard-*.jsonl"))


def digest(folder: Path) -> str:
    """SHA-256 of the shards of a folder."""
    hashes = [hashlib.sha256(file.read_bytes()).digest() for file in shard_files(folder)]
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def fingerprint(model: LoadedTarget | LoadedHead) -> str:
    """Tells models apart: SHA-256 of the config and of some numbers of every parameter, in 32 bits whatever their dtype."""
    found = hashlib.sha256(str(model.config).encode())
    for array in jax.tree.leaves(model.params):
        found.update(np.asarray(array.ravel()[:: max(1, array.size // 64)], np.float32).tobytes())
    return found.hexdigest()


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
            yield Conversation(tokens, answers, entry.get("is_plain", False))


def write_shards(models: LoadedModels, settings: DataSettings, prompts: list[list[Message]] | None, out: Path, shards: int) -> None:
    """Writes the shards that a folder lacks; a shard is there whole or not at all.

    Raises ValueError if the folder holds shards of other settings or another target.
    """
    out.mkdir(parents=True, exist_ok=True)
    described = json.loads(json.dumps(asdict(settings) | {"target": fingerprint(models.target)}))
    file = out / SETTINGS
    if file.exists() and json.loads(file.read_text()) != described:
        raise ValueError(f"{out} holds conversations of other settings, see {file}: give another folder")
    write_file(file, json.dumps(described, indent=2) + "\n")
    missing = [number for number in range(shards) if not (out / f"shard-{number:05}.jsonl").exists()]
    with Writer(models, settings, prompts) as writer, tqdm(missing, desc="shards", unit="shard") as bar:
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
