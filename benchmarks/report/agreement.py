"""Do two runs of the same command agree? Only ratios taken within a run are compared: absolute times are the machine's mood."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.record import table

RATIOS = (
    "speed_up",
    "decode_speed_up",
    "ratio_to_baseline",
    "on_over_off",
    "adaptive_over_better",
    "first_token_ratio",
    "throughput_ratio",
)
"""Keys of results under which a Spread of such ratios stands."""


class Agreement(NamedTuple):
    """One ratio, measured twice."""

    what: str
    first: float
    second: float

    @property
    def difference(self) -> float:
        """Of the second from the first, as a share."""
        return self.second / self.first - 1


def agreements(records: Sequence[dict]) -> list[Agreement]:
    """The ratios of the newest record and of the one before it with the same command; none if there is no such pair."""
    if not records:
        return []
    before = next((each for each in reversed(records[:-1]) if conditions(each) == conditions(records[-1])), None)
    if before is None:
        return []
    first, second = (dict(ratios(each["results"])) for each in (before, records[-1]))
    return [Agreement(what, first[what], second[what]) for what in second if what in first]


def conditions(record: dict) -> tuple:
    """What must be the same in both runs."""
    where = record["environment"]
    prompts = record.get("prompts", {}).get("sha256")
    return record["command"], prompts, where["cpu"], where["cores"], where["jax"], where["devices"]


def ratios(results: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Every ratio of some results with the names of what it is about.

    In:  {"batches": [{"batch": 4, "speed_up": {"median": 1.3, ...}}]}
    Out: ("batch 4 speed_up", 1.3)
    """
    if isinstance(results, list):
        for each in results:
            yield from ratios(each, where)
    elif isinstance(results, dict):
        own = " ".join(f"{key} {results[key]}" for key in ("batch", "tree", "name") if isinstance(results.get(key), str | int))
        inner = f"{where} {own}".strip()
        for key, value in results.items():
            if key in RATIOS and isinstance(value, dict) and "median" in value:
                yield f"{inner} {key}".strip(), value["median"]
            else:
                yield from ratios(value, inner)


def agreement_table(found: Sequence[Agreement]) -> str:
    """Every ratio twice, and by how much the runs differ."""
    rows = [[each.what, f"{each.first:.2f}", f"{each.second:.2f}", f"{each.difference:+.1%}"] for each in found]
    return table(["ratio", "first run", "second run", "difference"], rows)


def widest(found: Sequence[Agreement]) -> float:
    """The largest difference, whatever its sign; 0.0 of nothing."""
    return max((abs(each.difference) for each in found), default=0.0)
