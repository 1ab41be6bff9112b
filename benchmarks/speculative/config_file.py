"""The tuner's choice as a file for `jaxspec serve --config`."""

from benchmarks.record import measured_on
from benchmarks.speculative.tables import best_table


def config_file(record: dict) -> str:
    """YAML: the tree of the smallest batch size that has one. If others want another tree or none, the server compiles all of them
    and chooses while it runs (--speculative-adaptive)."""
    batches = record["results"]["batches"]
    choices = [at["choice"] for at in batches]
    lines = [f"# {record['command']}", f"# {measured_on(record)}. Model, head and dtype are to be given beside this file.", "#"]
    lines += [f"# {line}" for line in best_table(record["results"]).splitlines()]
    tree = next((each for each in choices if each != "plain"), None)
    if tree is None:
        lines += ["# Plain decoding was the fastest at every batch size.", "speculative-num-steps: 0"]
    else:
        steps, topk, nodes = tree.split("/")
        lines += [f"speculative-num-steps: {steps}", f"speculative-eagle-topk: {topk}", f"speculative-num-draft-tokens: {nodes}"]
        if set(choices) != {tree}:
            lines += ["speculative-adaptive: true"]
            trees = [each for each in dict.fromkeys(choices) if each != "plain"]
            lines += [f"speculative-adaptive-trees: {' '.join(trees)}"]
    return "\n".join([*lines, f"max-running-requests: {batches[-1]['batch']}", ""])
