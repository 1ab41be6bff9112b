"""What `jaxspec bench speculative` tells: tables, the lines of SGLang's script, and the file for the server."""

from collections.abc import Iterator

from jaxspec.commands.common import table

from .record import Spread, measured_on


def sglang_lines(results: dict, max_tokens: int) -> Iterator[dict]:
    """The records of SGLang's bench_speculative, one per batch size and tree; 0 steps are plain decoding. Times are seconds, speeds
    tokens per second of one request."""
    for at in results["batches"]:
        first = at["trees"][0]
        plain = {"tree": "0/0/0", "cycle_ms": first["cycle_ms"] / first["cost"]["median"]}
        for each in [plain, *at["trees"]]:
            steps, topk, nodes = map(int, each["tree"].split("/")[:3])
            length = results["acceptance"][each["tree"]]["accept_length"] if steps else 1.0
            seconds = each["cycle_ms"] / 1000
            yield {
                "batch_size": at["batch"],
                "steps": steps,
                "topk": topk,
                "num_draft_tokens": nodes,
                "acc_length": round(length, 3),
                "step_time": round(seconds, 5),
                "speed": round(length / seconds, 3),
                "completion_tokens": float(max_tokens),
            }


def tables(results: dict) -> dict[str, str]:
    """`best`: the choice per batch size; `brute force`: the choice against all trees; `batch N`: all trees at that batch size."""
    made = {} if "simulated_accept_lengths" in results else {"best": best_table(results)}
    made |= {"brute force": brute_force_table(results)} if results.get("exhaustive") else {}
    return made | {f"batch {each['batch']}": batch_table(results, each) for each in results["batches"]}


def best_table(results: dict) -> str:
    """The tuner's choices."""
    header = ["batch", "best tree", "accept length", "cost of a cycle, plain steps", "predicted", "speed-up (min..max)", "tokens/s"]
    rows = [
        [str(at["batch"]), *(plain_cells(at) if at["choice"] == "plain" else chosen_cells(at["confirmed"], results))]
        for at in results["batches"]
    ]
    return table(header, rows)


def brute_force_table(results: dict) -> str:
    """The tuner's choice against the best tree, both measured in rounds that the tuner did not use."""
    rows = []
    for at in results["batches"]:
        chosen, best = next((each for each in at["trees"] if each["tree"] == at["choice"]), None), best_of(at)
        shown = [f"{name_of(each)} {speed_up_of(each):.2f}" for each in (best, chosen)]
        rows.append([str(at["batch"]), *shown, f"{speed_up_of(chosen) / speed_up_of(best):.3f}"])
    return table(["batch", "best tree by brute force", "the tuner's choice", "choice / best"], rows)


def chosen_cells(chosen: dict, results: dict) -> list[str]:
    accepted = results["acceptance"][chosen["tree"]]
    return [
        chosen["tree"],
        f"{accepted['accept_length']:.2f}",
        f"{chosen['cost']['median']:.2f}",
        f"{chosen['predicted_speed_up']:.2f}",
        str(Spread(chosen["speed_up"]["values"])),
        f"{chosen['tokens_per_second']['median']:.0f}",
    ]


def plain_cells(at: dict) -> list[str]:
    return ["plain", "1.00", "1.00", "1.00", "1.00", f"{at['confirmed']['plain_tokens_per_second']['median']:.0f}"]


def best_of(at: dict) -> dict | None:
    """The fastest measured tree; None if plain decoding is faster."""
    best = max((each for each in at["trees"] if "speed_up" in each), key=lambda each: each["speed_up"]["median"])
    return best if best["speed_up"]["median"] > 1 else None


def name_of(tree: dict | None) -> str:
    return "plain" if tree is None else tree["tree"]


def speed_up_of(tree: dict | None) -> float:
    return 1.0 if tree is None else tree["speed_up"]["median"]


def batch_table(results: dict, at: dict) -> str:
    """All trees timed at one batch size, best prediction first."""
    lengths = results.get("simulated_accept_lengths")
    header = [f"tree, batch {at['batch']}", "cycle, ms", "in plain steps = break-even (min..max)"]
    if lengths:
        header += [f"SIMULATED speed-up at accept length {length:g}" for length in lengths]
        rows = [[*timed_cells(each), *simulated_cells(each)] for each in at["trees"]]
        return table(header, rows)
    header += ["accept length", "predicted speed-up", "measured (min..max)", "tokens/s"]
    rows = []
    for each in sorted(at["trees"], key=lambda each: each["predicted_speed_up"], reverse=True):
        measured = (
            [str(Spread(each["speed_up"]["values"])), f"{each['tokens_per_second']['median']:.0f}"]
            if "speed_up" in each
            else ["", ""]
        )
        length = results["acceptance"][each["tree"]]["accept_length"]
        rows.append([*timed_cells(each), f"{length:.2f}", f"{each['predicted_speed_up']:.2f}", *measured])
    return table(header, rows)


def timed_cells(each: dict) -> list[str]:
    return [each["tree"], f"{each['cycle_ms']:.2f}", str(Spread(each["cost"]["values"]))]


def simulated_cells(each: dict) -> list[str]:
    return ["too short" if value is None else f"{value:.2f}" for value in each["simulated_speed_up"].values()]


def notes(results: dict) -> str:
    """Skipped trees, differing texts, and the assumption behind simulated figures."""
    lines = []
    if "simulated_accept_lengths" in results:
        lines.append(
            f"simulated: accept lengths are assumed, cycle times are measured (head: {results['head']}), prefill is not counted"
        )
    if (dropped := results.get("dominated")) and not results["exhaustive"]:
        pairs = ", ".join(f"{tree} ({other})" for tree, other in dropped.items())
        lines.append(f"not timed because a smaller tree (in parentheses) accepts as much: {pairs}")
    different = [tree for tree, each in results.get("acceptance", {}).items() if each["equal"] < each["prompts"]]
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
