"""What the scripts of agents' libraries share: a question, what must come back, and how they report. They are told a server's URL,
whose model can't but write nonsense: what it gets right, the server's grammars make it."""

import asyncio
import inspect
import json
import sys
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

type Place = Literal["Paris", "Rome", "Oslo"]
QUESTION = "How is the weather in Paris?"
MOST_TOKENS = 200


class City(BaseModel):
    """A city and its weather."""

    model_config = ConfigDict(extra="forbid")  # a model that writes nonsense would add to it without an end

    name: Place
    degrees: int = Field(ge=-30, le=50)
    sunny: bool


class Calls:
    """The tool of all tests, and the places that it was called with."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def weather(self, city: Place) -> str:
        """The weather of a city."""
        assert city in ("Paris", "Rome", "Oslo"), city
        self.places.append(city)
        return f"9 degrees in {city}"

    def check(self, least: int = 1) -> None:
        """The model called, and calls reached the tool."""
        assert len(self.places) >= least, self.places
        self.places.clear()


def run(packages: str, *checks: Callable[[str, str], Any]) -> None:
    """Runs each check with the URL and the model's name; prints the versions and what passed."""
    url = sys.argv[1]
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    for check in checks:
        if inspect.isawaitable(waits := check(f"{url}/v1", model)):
            asyncio.run(waits)  # type: ignore[arg-type]
    versions = {name: version(name) for name in packages.split()}
    print(json.dumps({"versions": versions, "passed": [each.__name__ for each in checks]}))
