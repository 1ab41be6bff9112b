"""`jaxspec check-lossless` over several trees and many prompts, with a record of the result.

The exit status is 1 if any output differs from that of plain decoding at batch 1; the differences are printed.

Example:
    jaxspec bench lossless --num-prompts 50 --trees 5/4/8 3/1/4 --batch 1 8
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from jaxspec.commands.check_lossless import compare_all, show, ways_of_sampling
from jaxspec.commands.options import tree, whole
from jaxspec.commands.workbench import Workbench

from . import record
from .options import BenchmarkParser, add_common_options, exit_on_error, prompts_of

DEFAULT_TREES = ("5/4/8", "5/4/16", "3/1/4", "5/8/32")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = BenchmarkParser("lossless", __doc__)
    add_common_options(parser, num_prompts=50)
    trees = [tree(text) for text in DEFAULT_TREES]
    parser.add_argument(
        "--trees", type=tree, nargs="+", default=trees, metavar="S/K/N",
        help=f"num_steps/topk/num_draft_tokens (default: {' '.join(DEFAULT_TREES)})",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", "--batch", dest="batch", type=whole(1), nargs="+", default=[1, 8], metavar="N",
        help="requests that run together (default: 1 8)",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.8, help="temperature of the sampled runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1000, help="seed of the first sampled prompt (default: %(default)s)")
    return parser.parse(arguments)


def tables(results: Sequence[dict]) -> dict[str, str]:
    """Accept length per tree at the largest batch size, and the number of equal outputs at all batch sizes."""
    ways = list(dict.fromkeys(each["sampling"] for each in results))
    batch = max(each["batch"] for each in results)
    rows = []
    for name in dict.fromkeys(each["tree"] for each in results if each["tree"] != "plain"):
        of = {each["sampling"]: each for each in results if (each["tree"], each["batch"]) == (name, batch)}
        equal, total = (sum(each[field] for each in results if each["tree"] == name) for field in ("equal", "total"))
        rows.append([name, *(f"{of[way]['accept_length']:.2f}" for way in ways), f"{equal} of {total}"])
    return {"trees": record.table(["tree", *(f"accept length, {way}" for way in ways), "outputs equal to plain decoding"], rows)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every output equals that of plain decoding, otherwise 1."""
    options = parse(arguments)
    prompts = prompts_of(options)
    bench = Workbench.of(options)
    prompts = bench.ask(prompts, options.max_tokens)
    ways = ways_of_sampling(len(prompts.prompts), options.max_tokens, options.temperature, options.seed)
    comparisons = compare_all(bench, bench.encode(prompts.prompts, chat=options.chat), options.trees, options.batch, ways)
    print(show(comparisons), flush=True)
    record.write("lossless", options, prompts, [asdict(each) for each in comparisons])
    return 0 if all(each.equal == each.total for each in comparisons) else 1


if __name__ == "__main__":
    exit_on_error("lossless", main)
