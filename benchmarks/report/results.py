"""The records of benchmarks/results, and the tables that each benchmark makes of its own."""

from importlib import import_module
from pathlib import Path

from benchmarks.record import measured_on, read
from benchmarks.report.agreement import agreement_table, agreements


class Results:
    """All records of a directory, by file name without its ending, oldest first."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.files = {path.stem: records for path in sorted(directory.glob("*.jsonl")) if (records := read(path))}

    def find(self, name: str, *, before: bool = False) -> dict:
        """The newest record of a file, or the one before it. Raises ValueError if there is none."""
        records = self.files.get(name, [])
        if len(records) < 1 + before:
            raise ValueError(
                f"{self.directory.name} has no {'second ' if before else ''}record of {name}: run the benchmark that makes it"
            )
        return records[-1 - before]

    def block(self, words: list[str]) -> str:
        """What stands between two markers (markers.py). Raises ValueError if there is no such record or table."""
        if not 2 <= len(words) <= 3 or (len(words) == 3 and words[2] != "before"):
            raise ValueError(f"a marker names a file, a table and perhaps `before`; got {' '.join(words)!r}")
        name, wanted = words[0], words[1].replace("_", " ")
        record = self.find(name, before=len(words) == 3)
        made = tables_of(record)
        if found := agreements(self.files[name]):
            made["agreement"] = agreement_table(found)
        if wanted not in made:
            raise ValueError(f"{name} has no table {wanted!r}: there is {', '.join(made)}")
        return f"`{record['command']}` ({measured_on(record)})\n\n{made[wanted]}"


def tables_of(record: dict) -> dict[str, str]:
    """A record's tables in Markdown, by name, as its benchmark makes them."""
    return import_module(f"benchmarks.{record['benchmark']}").tables(record["results"])


def about(record: dict) -> str:
    """What a benchmark says about itself, in its first paragraph."""
    module = import_module(f"benchmarks.{record['benchmark']}")
    return " ".join((module.__doc__ or "").split("\n\n")[0].split())
