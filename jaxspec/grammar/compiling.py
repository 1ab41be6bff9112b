"""Compiling grammars with llguidance, within limits. Imports little of jaxspec, so that the process of trial.py starts fast."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import llguidance

from jaxspec.grammar.corrections import OF_MANY, OF_NAMES, OF_ONE, corrected
from jaxspec.grammar.ebnf import as_lark

LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""A state takes 1 to 2 kB. The other limits are llguidance's own: a mask takes 20 ms at most."""
WHITESPACE = r"(?:\x20|\x0A[\x20\x09]{0,20})"
"""Between the tokens of JSON: a space, or a line break with indentation. A model can't fill its budget with spaces."""
MOST_TRIES = 50  # parts of a schema that are compiled to find the one at fault
UNFORCED = '%llguidance {"no_forcing": true}'
"""A line of Lark. Without it llguidance reads ahead all that a grammar forces, for every mask, and never stops where a lexeme can
only repeat itself: in `/a*/ "ab"` after "aa". With it no tokens are known to be forced."""
MOST_FORCED = 8192  # characters, or repetitions in a regular expression; reading so far ahead takes 2 ms
SEPARATING = ("whitespace_pattern", "item_separator", "key_separator")  # x-guidance: what is between parts may be such a lexeme
ONE_SPACE = re.compile(r'"item_separator": ", "|"key_separator": ": "')  # these are none
BRANCHING = re.compile(r"\\[sdw][*+]|\(\.\|\\n\)\*")  # repetitions that may always go on in more than one way
COUNTS = re.compile(r'(?:[{,]|"min(?:Length|Items)": )(\d{1,18})[,}]')
ESCAPES = r"\"bfnrt"
"""Not \\uXXXX: with it a name that the schema describes could be written so that it passes for another one."""
CONTROL = re.compile(r"\\(u00[017]|u\{|x[017{]|[av])")
"""What a schema's text has if it may ask for a character that can only be written as \\uXXXX."""


class VocabularySource(NamedTuple):
    """What llguidance must know of a tokenizer, in a form that a process can be sent."""

    tokenizer: str
    """A tokenizer.json; "byte": token i is the byte i."""
    size: int
    """Of the model's vocabulary."""
    ends: Sequence[int]
    """The end-of-sequence tokens."""
    tags: Mapping[str, int]
    """Added tokens that are text, such as <tool_call>, by the names that they don't have in `tokenizer`."""
    special: Mapping[str, int]
    """Added tokens that are not text: no text becomes one of them."""

    def load(self) -> llguidance.LLTokenizer:
        """Takes up to a second."""
        whole = self.tokenizer if self.tokenizer == "byte" else _WithTags(self)
        return llguidance.LLTokenizer(whole, n_vocab=self.size, eos_token=list(self.ends) or None)  # type: ignore[arg-type]


class _WithTags:
    """A tokenizer for llguidance, which itself would take all added tokens in angle brackets for special ones."""

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, source: VocabularySource):
        self._rest = llguidance.LLTokenizer(source.tokenizer, n_vocab=source.size, slices=[])
        self._tags, longest_first = source.tags, sorted(source.tags, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})").split
        every = range(source.size)
        self.eos_token_id = source.ends[0] if source.ends else None
        self.special_token_ids = [*source.special.values(), *filter(self._rest.is_special_token, every)]
        names = {token: name.encode() for name, token in {**source.tags, **source.special}.items()}
        self.tokens = [names.get(token) or self._rest.decode_bytes([token]) for token in every]

    def __call__(self, text: str) -> list[int]:
        """As a model writes it: a tag is one token."""
        found = [[self._tags[part]] if part in self._tags else self._rest.tokenize_str(part) for part in self._split(text) if part]
        return [token for tokens in found for token in tokens]


def compiled(vocabulary: llguidance.LLTokenizer, kind: str, text: str) -> llguidance.LLMatcher:
    """The matcher at the grammar's beginning. `kind`: the field of SamplingParams, whose value is `text`.

    Raises ValueError, with the reason and, for a schema, the place.
    """
    if kind == "structural_tag":
        return _of_structural_tag(vocabulary, json.loads(text))
    try:
        return _matcher(vocabulary, _grammar(kind, text))
    except ValueError as error:
        if kind != "json_schema":
            raise
        place = _place(vocabulary, json.loads(text), str(error))
        raise ValueError(f"{error} (at {place})") from None


def _of_structural_tag(vocabulary: llguidance.LLTokenizer, tag: Any) -> llguidance.LLMatcher:
    writer = StructuralTagWriter()
    grammar = writer.grammar(tag)
    try:
        return _matcher(vocabulary, grammar)
    except ValueError:
        for part in writer.parts:
            try:
                compiled(vocabulary, part.kind, part.text)
            except ValueError as error:
                raise ValueError(f"{part.place}: {error}") from None
        raise


def _grammar_of_schema(schema: Mapping[str, Any]) -> str:
    text, asked = json.dumps(schema), schema.get("x-guidance")
    is_fixed = isinstance(asked, Mapping) and asked.get("whitespace_flexible") is False  # a pattern would make it flexible
    space, escapes = None if is_fixed else WHITESPACE, None if CONTROL.search(text) else ESCAPES
    made = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(corrected(schema)), defaults={"whitespace_pattern": space, "json_allowed_escapes": escapes}
    )
    return _unforced(made) if may_run_on("json_schema", text) else made


def may_run_on(kind: str, text: str, *, is_part: bool = False) -> bool:
    """Whether a grammar might force a very long text. `is_part`: something may follow it. (Some that can't lose forced drafts.)"""
    times = reduce(lambda product, count: min(product * max(1, int(count)), MOST_FORCED + 1), COUNTS.findall(text), 1)
    if kind == "grammar" or max(len(text), times) > MOST_FORCED:
        return True
    if kind == "json_schema":
        return any(f'"{name}"' in ONE_SPACE.sub("", text) for name in SEPARATING)
    return kind == "regex" and is_part and re.search(r"[*+]|,\}", BRANCHING.sub("", text.replace("\\\\", ""))) is not None


def _unforced(grammar: str) -> str:
    [form] = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"name": "", "lark_grammar": f"start: @all\n{UNFORCED}"}, {**form, "name": "all"}]})


def _grammar(kind: str, text: str) -> str:
    if kind == "json_schema":
        return _grammar_of_schema(json.loads(text))
    if kind == "grammar":
        return f"{as_lark(text)}\n{UNFORCED}"
    made, runs_on = llguidance.grammar_from(kind, text), may_run_on(kind, text)  # type: ignore[arg-type]
    if kind == "regex":
        return _unforced(made) if runs_on else made
    return f"{made}\n{UNFORCED}" if runs_on else made


def _matcher(vocabulary: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(" ".join(matcher.get_error().split()))
    return matcher


def _place(vocabulary: llguidance.LLTokenizer, schema: Any, reason: str) -> str:
    """The innermost part of the schema that can't be compiled for the same reason, as a JSON pointer."""
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, tries = "#", MOST_TRIES
    while True:
        for name, part in _parts(schema):
            tries -= 1
            if tries < 0:
                return place
            try:
                _matcher(vocabulary, _grammar_of_schema(definitions | part))
            except ValueError as error:
                if str(error) == reason:
                    place, schema = f"{place}/{name}", part
                    break
        else:
            return place


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly inside one."""
    found = [(name, schema[name]) for name in OF_ONE if name in schema]
    for name, parts in schema.items():
        if name in OF_NAMES and isinstance(parts, dict):
            found += [(f"{name}/{key}", part) for key, part in parts.items()]
        elif name in OF_MANY and isinstance(parts, list):
            found += [(f"{name}/{number}", part) for number, part in enumerate(parts)]
    return ((name, part) for name, part in found if isinstance(part, dict))


class Part(NamedTuple):
    """A grammar inside a structural tag."""

    place: str
    kind: str
    """As in `compiled`."""
    text: str


class StructuralTagWriter:
    """Writes a structural tag, xgrammar's description of a text by its tags and what is between them, as a grammar for llguidance:
    rules in Lark, and the grammars of its parts."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._rules: list[str] = []

    def grammar(self, tag: Any) -> str:
        """The whole. Raises ValueError, with the place."""
        lark = "\n".join([f"start: {self.written(format_of(tag), 'format')}", *self._rules, r"TEXT: /(.|\n)*/"])
        beside = [self._named(part, number) for number, part in enumerate(self.parts)]
        if len(lark) > MOST_FORCED or any(may_run_on(part.kind, part.text, is_part=True) for part in self.parts):
            lark += f"\n{UNFORCED}"
        return json.dumps({"grammars": [{"name": "tag", "lark_grammar": lark}, *beside]})

    def written(self, form: Any, place: str, end: str | None = "") -> str:
        """A format as an expression in Lark, and after it the string that ends it, at whose first occurrence any text ends. "":
        the whole text ends there; None: something else follows, so that any text would have no end."""
        kind = form.get("type") if isinstance(form, dict) else None
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise ValueError(f"a format's type must be one of {', '.join(_FORMATS)} (at {place})")
        if unknown := form.keys() - {"type", *_FORMATS[kind]}:
            raise ValueError(f"{min(unknown)} is not supported in {kind} (at {place})")
        if end is None and kind in ("any_text", "triggered_tags"):
            raise ValueError(f"{kind} must come last in a sequence or a tag, as it goes on up to the end (at {place})")
        behind = f" {_quoted(end)}" if end else ""
        match kind:
            case "any_text":
                return self._up_to(end) if end else "TEXT"
            case "const_string":
                return _quoted(_string(form, "value", place)) + behind
            case "json_schema" | "regex" | "grammar":
                [name] = _FORMATS[kind]
                text = json.dumps(_object(form, name, place)) if kind == "json_schema" else _string(form, name, place)
                self.parts.append(Part(f"{place}.{name}", kind, text))
                if kind == "regex" and text and end:
                    [*_, form] = json.loads(_grammar(kind, text))["grammars"]
                    return self._up_to(end, form["lark_grammar"].removeprefix("start: "))
                return f"@part{len(self.parts) - 1}{behind}"
            case "tag":
                return self._rule(self._tag(form, place, _string(form, "begin", place), end))
            case "triggered_tags":
                return self._triggered(form, place, end or "")
            case "or":
                return self._rule(" | ".join(self._each(form, "elements", place, end, end)))
            case "sequence":
                return self._rule(" ".join(self._each(form, "elements", place, None, end)))
        between = None if end else end  # before an end something follows
        tags, separator = " | ".join(self._each(form, "tags", place, between, between)), _string(form, "separator", place)
        again = "" if form.get("stop_after_first") else f" ({_quoted(separator)} ({tags}))*"
        return self._rule(f"(({tags}){again}){'' if form.get('at_least_one') else '?'}{behind}")

    def _each(self, form: dict[str, Any], name: str, place: str, end: str | None, of_last: str | None) -> list[str]:
        *others, last = enumerate(_listed(form, name, place))
        ends = [(*each, end) for each in others] + [(*last, of_last)]
        return [self.written(each, f"{place}.{name}.{index}", of_each) for index, each, of_each in ends]

    def _tag(self, form: Any, place: str, begin: str, end: str | None) -> str:
        """begin, content and its own end."""
        own = _string(form, "end", place)
        content = self.written(form.get("content"), f"{place}({begin[-60:]!r}).content", own or end)
        parts = [_quoted(begin), content, _quoted(end or "") if own else '""']
        return " ".join(part for part in parts if part != '""') or '""'

    def _triggered(self, form: dict[str, Any], place: str, end: str) -> str:
        """Any text, in which each trigger begins one of the tags."""
        tags, rules = _listed(form, "tags", place), []
        begins = [_string(tag, "begin", f"{place}.tags.{index}") for index, tag in enumerate(tags)]
        triggers = _listed(form, "triggers", place)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise ValueError(f"triggers must be a list of strings, not empty ones (at {place})")
        for trigger in triggers:
            rests = [
                self._tag(tag, f"{place}.tags.{index}", begin.removeprefix(trigger), None if end else end)
                for index, (tag, begin) in enumerate(zip(tags, begins, strict=True))
                if begin.startswith(trigger)
            ]
            if not rests:
                raise ValueError(f"no tag begins with the trigger {trigger!r:.80} (at {place})")
            rules.append(f"{self._up_to(trigger)} ({' | '.join(rests)})")
        for index, begin in enumerate(begins):
            if not begin.startswith(tuple(triggers)):
                raise ValueError(f"begin must start with one of the triggers (at {place}.tags.{index})")
        tagged, some, rest = " | ".join(rules), form.get("at_least_one"), self._up_to(end) if end else "TEXT"
        if form.get("stop_after_first"):
            return self._rule(f"({tagged}) {_quoted(end)}" + ("" if some else f" | {rest}"))
        return self._rule(f"({tagged}){'+' if some else '*'} {rest}")

    def _rule(self, expression: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def _up_to(self, end: str, text: str = "TEXT") -> str:
        """Text up to and including the first occurrence of a string. (Lazy: otherwise a terminal takes all it can.)"""
        return self._rule(f"{text} {_quoted(end)}", "[lazy]")

    @staticmethod
    def _named(part: Part, number: int) -> dict[str, Any]:
        """The part's grammar, to be named by rules."""
        try:
            grammar = _grammar(part.kind, part.text)
        except ValueError as error:
            raise ValueError(f"{part.place}: {error}") from None
        form = json.loads(grammar)["grammars"][-1] if part.kind != "grammar" else {"lark_grammar": grammar}
        return {**form, "name": f"part{number}"}


def format_of(tag: Any) -> Any:
    """The format of a structural tag, also of one in the older form, with `structures` and `triggers`. Raises ValueError."""
    if not (isinstance(tag, dict) and "structures" in tag):
        return tag.get("format") if isinstance(tag, dict) else None
    tags = []
    for index, structure in enumerate(_listed(tag, "structures", "#")):
        schema = {"type": "json_schema", "json_schema": _object(structure, "schema", f"structures.{index}")}
        tags.append({"type": "tag", "begin": structure.get("begin"), "content": schema, "end": structure.get("end")})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


_FORMATS: dict[str, tuple[str, ...]] = {
    "any_text": (),
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
"""The types of a structural tag's formats, and their fields."""


def _quoted(text: str) -> str:
    """As a string of Lark, which can't hold a bare U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _field(form: Any, name: str, place: str, kind: type) -> Any:
    value = form.get(name) if isinstance(form, dict) else None
    if not isinstance(value, kind) or value == []:
        said = "a string" if kind is str else "an object" if kind is dict else "a list that holds something"
        raise ValueError(f"{name} must be {said} (at {place})")
    return value


_string, _object, _listed = (partial(_field, kind=kind) for kind in (str, dict, list))
