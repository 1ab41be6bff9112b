"""instructor_checks.py URL: instructor's modes, whole and in parts."""

from typing import Any

import instructor
from openai import OpenAI
from shared import MOST_TOKENS, QUESTION, City, run

MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": MOST_TOKENS, "temperature": 0}


def modes(url: str, model: str) -> None:
    """Without a second try: what comes first must be right."""
    for mode in MODES:
        made = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
        body = {"model": model, "max_retries": 0, **ASKED}
        answer = made.chat.completions.create(response_model=City, **body)
        assert isinstance(answer, City), (mode, answer)
        parts = [*made.chat.completions.create_partial(response_model=City, **body)]
        assert len(parts) > 1 and parts[-1].model_dump() == answer.model_dump(), (mode, parts, answer)


if __name__ == "__main__":
    run("instructor", modes)
