"""What a sweep found, for people. All of it is made from the recorded results alone."""

from benchmarks.engines import Spread
from benchmarks.record import table


def tables(results: dict) -> dict[str, str]:
    """`best`: the choice per batch size; `brute force`: against all trees; `batch N`: all trees at that size."""
    made = {} if "simulated_accept_lengths" in results else {"best": best_table(results)}
    made |= {"brute force": brute_force_table(results)} if results.get("exhaustive") else {}
    return made | {f"batch {each['batch']}": batch_table(results, each) for each in results["batches"]}


def best_table(results: dict) -> str:
    """What the tuner chose."""
    header = [
        "batch",
        "best tree",
        "accept length",
        "cycle, plain steps",
        "predicted",
        "speed-up, measured anew (min..max)",
        "tokens/s",
    ]
    rows = [
        [str(at["batch"]), *(plain_cells(at) if at["choice"] == "plain" else chosen_cells(at["confirmed"], results))]
        for at in results["batches"]
    ]
    return table(header, rows)


def brute_force_table(results: dict) -> str:
    """How the tuner's choice does where every tree is measured, in rounds of which the tuner knew nothing."""
    rows = []
    for at in results["batches"]:
        chosen, best = next((each for each in at["trees"] if each["tree"] == at["choice"]), None), best_of(at)
        shown = [f"{name(each)} {speed_up(each):.2f}" for each in (best, chosen)]
        rows.append([str(at["batch"]), *shown, f"{speed_up(chosen) / speed_up(best):.3f}"])
    return table(["batch", "best by brute force", "the tuner's choice there", "choice / best"], rows)


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
    """The fastest tree of those that were measured; None if plain decoding is faster."""
    best = max((each for each in at["trees"] if "speed_up" in each), key=lambda each: each["speed_up"]["median"])
    return best if best["speed_up"]["median"] > 1 else None


def name(tree: dict | None) -> str:
    return "plain" if tree is None else tree["tree"]


def speed_up(tree: dict | None) -> float:
    return 1.0 if tree is None else tree["speed_up"]["median"]


def batch_table(results: dict, at: dict) -> str:
    """All trees that were timed at one batch size, the most promising first."""
    lengths = results.get("simulated_accept_lengths")
    header = [f"tree, batch {at['batch']}", "cycle, ms", "in plain steps: break-even (min..max)"]
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


def worth_knowing(results: dict) -> str:
    """What was left out and why, differences of text, and the assumption behind simulated figures."""
    lines = []
    if "simulated_accept_lengths" in results:
        lines.append(f"simulated: accept lengths are assumed, cycle times measured (head: {results['head']}), prefills not counted")
    if (dropped := results.get("dominated")) and not results["exhaustive"]:
        pairs = ", ".join(f"{tree} ({other})" for tree, other in dropped.items())
        lines.append(f"not timed, because a smaller tree accepts as much: {pairs}")
    different = [tree for tree, each in results.get("acceptance", {}).items() if each["equal"] < each["prompts"]]
    if different:
        lines.append(
            f"some greedy text differs from plain decoding's with {', '.join(different)}: near ties, or see jaxspec check-lossless"
        )
    return "\n".join(lines)
