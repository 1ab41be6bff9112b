"""Chat templates by name (`--chat-template NAME`), for models that bring none: formats of SGLang, by its names.

They are what SGLang writes, even where a model's own template differs: `mistral` has no [INST] between a system message and the
first question.

The tokenizer's own beginning of a text (Llama's <s>) is put in front, and the strings at which a format's turns end stop an answer.
"""

from typing import NamedTuple

MESSAGES = "{%- for message in messages if message['role'] != 'system' %}"
SYSTEM = (
    "{%- set given = messages | selectattr('role', 'equalto', 'system') | list %}"
    "{%- set system = given[-1]['content'] if given else {default} %}"
)
"""The last system message counts, wherever it stands."""


class ChatFormat(NamedTuple):
    """One way to write a conversation."""

    template: str
    stop: tuple[str, ...] = ()


def system_or(default: str) -> str:
    """Template code that sets `system` to the last system message, or to this text if there is none."""
    return SYSTEM.replace("{default}", repr(default))


def instructions(opening: str, closing: str) -> str:
    """Llama 2's turns: `[INST] question [/INST] answer </s><s>[INST] question [/INST]`, the system message in the first."""
    return (
        system_or("")
        + f"{{{{ {opening!r} + system + {closing!r} if system else '[INST] ' }}}}"
        + MESSAGES
        + "{%- if loop.first %}{{ message['content'] + ' ' }}"
        "{%- elif message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' ' }}"
        "{%- else %}{{ '[/INST] ' + message['content'] + ' </s><s>' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{ '[/INST]' }}{%- endif %}"
    )


CHAT_FORMATS = {
    "chatml": ChatFormat(
        system_or("You are a helpful assistant.")
        + "{{ '<|im_start|>system\n' + system + '<|im_end|>\n' }}"
        + MESSAGES
        + "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}",
        ("<|endoftext|>", "<|im_end|>"),
    ),
    "llama-2": ChatFormat(instructions("[INST] <<SYS>>\n", "\n<</SYS>>\n\n"), ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")),
    "mistral": ChatFormat(
        instructions("[SYSTEM_PROMPT]\n", "\n[/SYSTEM_PROMPT]\n\n"), ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
    ),
    "vicuna_v1.1": ChatFormat(
        system_or(
            "A chat between a curious user and an artificial intelligence assistant. "
            "The assistant gives helpful, detailed, and polite answers to the user's questions."
        )
        + "{{ system + ' ' }}"
        + MESSAGES
        + "{{ 'USER: ' + message['content'] + ' ' if message['role'] == 'user' else 'ASSISTANT: ' + message['content'] + '</s>' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{%- endif %}",
    ),
}
