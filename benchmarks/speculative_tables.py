"""What `jaxspec bench speculative` tells: tables, and the file for the server."""

from jaxspec.commands.common import table

from .record import Spread, measured_on


def tables(results: dict) -> dict[str, str]:
    """`best`: the choice per batch size; `time`: where its cycles' time goes; `batch N`: all trees at that batch size."""
    made = {"best": best_table(results)}
    if "per_cycle_ms" in results["batches"][0]["confirmed"]:  # records before 27 November 2026 have none
        made["time"] = time_table(results)
    return made | {f"batch {each['batch']}": batch_table(results, each) for each in results["batches"]}


def best_table(results: dict) -> str:
    """The tuner's choices."""
    header = ["batch", "best tree", "accept length", "cost of a cycle, plain steps", "predicted", "speed-up (min..max)", "tokens/s"]
    rows = []
    for at in results["batches"]:
        chosen = at["confirmed"]
        if at["choice"] == "plain":
            cells, speed = ["plain", "1.00", "1.00", "1.00", "1.00"], chosen["plain_tokens_per_second"]
        else:
            ratios = results["acceptance"][chosen["tree"]]["accept_length"], chosen["cost"]["median"], chosen["predicted_speed_up"]
            cells = [chosen["tree"], *(f"{each:.2f}" for each in ratios), str(Spread(chosen["speed_up"]["values"]))]
            speed = chosen["tokens_per_second"]
        rows.append([str(at["batch"]), *cells, f"{speed['median']:.0f}"])
    return table(header, rows)


def time_table(results: dict) -> str:
    """The host's time per cycle, prefill included: of plain decoding, and of the tree that was measured last."""
    rows = [
        [str(at["batch"]), name, *(f"{milliseconds:.2f}" for milliseconds in at["confirmed"][times].values())]
        for at in results["batches"]
        for name, times in (("plain", "plain_per_cycle_ms"), (at["confirmed"]["tree"], "per_cycle_ms"))
    ]
    return table(["batch", "", "host, ms per cycle", "launching", "waiting"], rows)


def batch_table(results: dict, at: dict) -> str:
    """All trees timed at one batch size, best prediction first."""
    header = [f"tree, batch {at['batch']}", "cycle, ms", "in plain steps = break-even (min..max)"]
    header += ["accept length", "predicted speed-up", "measured (min..max)", "tokens/s"]
    rows = []
    for each in sorted(at["trees"], key=lambda each: each["predicted_speed_up"], reverse=True):
        timed = [each["tree"], f"{each['cycle_ms']:.2f}", str(Spread(each["cost"]["values"]))]
        length = results["acceptance"][each["tree"]]["accept_length"]
        measured = ["", ""]
        if "speed_up" in each:
            measured = [str(Spread(each["speed_up"]["values"])), f"{each['tokens_per_second']['median']:.0f}"]
        rows.append([*timed, f"{length:.2f}", f"{each['predicted_speed_up']:.2f}", *measured])
    return table(header, rows)


def notes(record: dict) -> str:
    """Skipped trees, differing texts, and devices that are none."""
    results, lines = record["results"], []
    if (record["flags"].get("tp_size") or 1) > 1 and set(record["environment"]["devices"]) == {"cpu"}:
        lines.append("the devices are virtual, of one CPU: times show what sharing a model costs, not what it gains")
    if (dropped := results.get("dominated")) and not results["exhaustive"]:
        pairs = ", ".join(f"{tree} ({other})" for tree, other in dropped.items())
        lines.append(f"not timed because a smaller tree (in parentheses) accepts as much: {pairs}")
    different = [tree for tree, each in results["acceptance"].items() if each["equal"] < each["prompts"]]
    if different:
        lines.append(f"texts differ from plain decoding with {', '.join(different)}: near ties, or run jaxspec check-lossless")
    return "\n".join(lines)


def config_file(record: dict) -> str:
    """The choice as YAML for `jaxspec serve --config`: the tree of the smallest batch size that has one. If other batch sizes want
    another tree or none, the server compiles all of them and chooses while it runs (--speculative-adaptive)."""
    batches = record["results"]["batches"]
    choices = [at["choice"] for at in batches]
    lines = [f"# {record['command']}", f"# {measured_on(record)}. Give the model, the head and the dtype on the command line.", "#"]
    lines += [f"# {line}" for line in best_table(record["results"]).splitlines()]
    tree = next((each for each in choices if each != "plain"), None)
    if tree is None:
        lines += ["# Plain decoding was the fastest at every batch size.", "speculative-num-steps: 0"]
    else:
        steps, topk, nodes, *of_head = tree.split("/")
        numbers = [f"speculative-num-steps: {steps}", f"speculative-eagle-topk: {topk}", f"speculative-num-draft-tokens: {nodes}"]
        lines += [f"tree: {tree}"] if of_head else numbers
        lines += ["speculative-ngram: true"] if record["results"].get("ngram") else []
        if set(choices) != {tree}:
            lines += ["speculative-adaptive: true"]
            trees = [each for each in dict.fromkeys(choices) if each != "plain"]
            lines += [f"speculative-adaptive-trees: {' '.join(trees)}"]
    return "\n".join([*lines, f"max-running-requests: {batches[-1]['batch']}", ""])
