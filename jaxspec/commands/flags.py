"""What the engine and LLM say, in the words of the command line."""

import re

from jaxspec.commands.options import FLAG_OF, OPTIONS

CODE_OF_PLAIN = "TreeShape(num_steps=0)"
"""How messages call the tree of plain decoding."""
NAME = re.compile(r"(give |leave out )?(?<![\w/.-])([a-z]+(?:_[a-z]+)*)(?![\w/-]|\.\w)(=True)?")
"""An argument's name, perhaps; no part of a path or of another name."""


def in_flags(message: str) -> str:
    """A message with flags in place of LLM's arguments; TreeShape's names stay, as they end their flags' names.

    In:  "prefill_chunk must be at least 1, got 0: give ngram=True"
    Out: "--chunked-prefill-size must be at least 1, got 0: give --speculative-ngram"
    """
    flags = FLAG_OF | {"draft": OPTIONS["speculative_draft_model_path"].flag, "token_map": OPTIONS["speculative_token_map"].flag}

    def flag(found: re.Match[str]) -> str:
        verb, name, value = found.groups("")
        is_name = verb or value or "_" in name  # else it may be an ordinary word
        return verb + flags[name] if name in flags and is_name else found[0]

    return re.sub(NAME, flag, message.replace(CODE_OF_PLAIN, "--tree plain"))
