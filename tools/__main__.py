"""All campaigns and benchmarks: what each is made of is a row, and one command runs them.

    $ python -m tools list
    $ sudo .venv/bin/python -m tools run kill-agent kill-node --size-mb 64 --json kills.json
    $ python -m tools run bench --short            # all rows of a tool
    $ python -m tools run kill-node --help         # what else can be said
    $ python -m tools report reliability > docs/explanation/reliability.md

`docs/explanation/how-we-test.md` says what each shows, how long it takes, and its last result.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, Protocol

from tools.lab.commands import Lab, run_command
from tools.lab.report import PAGES
from tools.lab.results import read_results


class NamedRow(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def what(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Tool:
    """One function, which runs some rows, or what its own options say."""

    name: str
    what: str
    function: str
    """MODULE:FUNCTION; imported when it is needed, as some need torch or MLX."""
    table: str = ""
    """MODULE:NAME of its rows, whose names are the function's first arguments."""
    lab: Lab = "none"
    """Whether it makes network namespaces; if it needs them: Linux, root."""

    def rows(self) -> Iterable[NamedRow]:
        found: Iterable[NamedRow] = resolve_name(self.table) if self.table else ()
        return found


CAMPAIGN = "tools.campaigns:run"
# fmt: off
TOOLS = (
    Tool("chaos", "losses of agents and trainers", CAMPAIGN, "tools.chaos.bars:CAMPAIGNS",
         lab="needed"),
    Tool("launches", "kills and floods of pmesh run --on", CAMPAIGN,
         "tools.launches.rows:CAMPAIGNS", lab="needed"),
    Tool("hostile", "what attacks cost a training", CAMPAIGN, "tools.hostile.rows:CAMPAIGNS",
         lab="needed"),
    Tool("kills", "kills of ranks of torch and mlx-lm", CAMPAIGN, "tools.kills.rows:CAMPAIGNS",
         lab="some"),
    Tool("slow-steps", "steps of training on bad networks beside gloo",
         "tools.networks.run:steps", lab="needed"),
    Tool("slow-calls", "small calls beside the round trip", "tools.networks.run:calls",
         lab="needed"),
    Tool("slow-faults", "kills, cuts and partitions on bad networks",
         "tools.networks.run:faults", lab="needed"),
    Tool("fuzz", "members and trainers that lie to real agents", "tools.fuzz.run:fuzz"),
    Tool("torch-ends", "short trainings with torch end well", "tools.torch_ends:run"),
    Tool("torch-suite", "torch's own cases on gloo and on pmesh", "tools.torch_suite:run"),
    Tool("bench", "speed beside gloo and MLX, memory, compression", "tools.bench.run:run",
         "tools.bench.cases:CASES", lab="some"),
    Tool("compare", "pmesh beside MacFleet, MLX's ring and gloo at the same work",
         "tools.compare.run:run", "tools.compare.run:ROWS", lab="some"),
    Tool("losses", "what compression does to a training", "tools.bench.training:run"),
    Tool("kernels", "the kernels of compression alone", "tools.bench.kernels:run"),
    Tool("local-updates", "what local updates do to a training", "tools.bench.local_updates:run"),
    Tool("local-bytes", "what local updates send", "tools.bench.local_bytes:run", lab="needed"),
    Tool("sharded", "memory of sharded training", "tools.bench.sharded:run"),
    Tool("torch-speed", "training with torch beside gloo", "tools.torch_bench:run",
         lab="some"),
    Tool("mlx-overlap", "what the drop-in for mx.distributed hides of the network",
         "tools.mlx_speed:overlap", lab="needed"),
    Tool("mlx-call", "what the drop-in adds to a call", "tools.mlx_speed:call"),
    Tool("pipelined", "a token of a model on two machines", "tools.pipelined:measure"),
    Tool("pipeline-speed", "a step of training in stages beside torch's Schedule1F1B",
         "tools.pipeline_speed:measure", lab="needed"),
    Tool("pipeline-store", "a step in stages whose activations a store keeps",
         "tools.pipeline_store:measure", lab="needed"),
    Tool("checkpoints", "what an asynchronous save costs a step", "tools.bench_checkpoints:run"),
    Tool("sync", "what pmesh run --sync costs a training", "tools.sync_speed:run", lab="needed"),
    Tool("shares", "unequal ranks, by measured speed", "tools.shares:run", lab="needed"),
    Tool("rpc-speed", "calls between two ranks beside torch's RPC and send", "tools.rpc_speed:run"),
    Tool("store-writes", "a million writes to a store", "tools.store_writes:run"),
    Tool("trace-cost", "what pmesh trace adds to an op", "tools.trace_cost:run"),
    Tool("watching", "what pmesh dashboard and pmesh top hold and take", "tools.watching:run"),
    Tool("tiny", "makes a tiny model to fine-tune with mlx-lm", "tools.lora:tiny"),
)
# fmt: on


def show() -> None:
    """The tools, each with its rows."""
    for tool in TOOLS:
        print(f"{tool.name}: {tool.what}")
        for row in tool.rows():
            print(f"    {row.name:18} {row.what}")


def find(name: str) -> Tool:
    """The tool of this name, or the one that has the row; raises ValueError."""
    for tool in TOOLS:
        if tool.name == name:
            return tool
    for tool in TOOLS:
        if name in {row.name for row in tool.rows()}:
            return tool
    raise ValueError(f"nothing is called {name!r}; 'python -m tools list' shows what there is")


def run(name: str, *words: str) -> int:
    """Run rows of one tool; all of them if the tool's own name is all that is said."""
    tool = find(name)
    rows = [row.name for row in tool.rows()]
    if tool.name != name:
        words = (name, *words)
    elif not words or words[0] not in rows:
        words = (*rows, *words)
    function: Any = resolve_name(tool.function)
    return run_command(function, words, name=f"tools run {name}", lab=tool.lab)


def report(
    page: Literal["reliability", "benchmarks", "compression-speed", "compression-training"],
    *files: Path,
    plot: Path | None = None,
) -> None:
    """Write a page, from stored results, to standard output.

    Args:
        page: Which one.
        files: The results, as `run --json` wrote them; those beside the page if there are none.
        plot: Where a picture of compression goes: .svg, .png or .pdf.
    """
    folder = {"compression-speed": "compression"}.get(page, page)
    files = files or tuple(sorted((PAGES / folder).glob("*.json")))
    if page == "reliability":
        from tools.chaos.report import render
        from tools.lab.measured import Results

        print(render([read_results(file, Results) for file in files]), end="")
    elif page == "compression-training":
        from tools.bench import training

        learned = [each for file in files for each in read_results(file, training.Many)]
        print(training.render(learned), end="")
        if plot is not None:
            from tools.bench.plots import draw_losses  # who asks has matplotlib

            draw_losses(plot, learned)
    else:
        from tools.bench import report, results

        found = [read_results(file, results.CaseResults) for file in files]
        print(report.render(page, found), end="")
        if plot is not None:
            from tools.bench.plots import draw_speeds

            draw_speeds(plot, [measured for each in found for measured in each.measured])


def main(words: Sequence[str] | None = None) -> int:
    """The command line; the process's own words if None."""
    match list(sys.argv[1:] if words is None else words):
        case ["list"]:
            show()
        case ["run", name, *rest] if not name.startswith("-"):
            try:
                return run(name, *rest)
            except ValueError as e:
                print(f"tools: {e}", file=sys.stderr)
                return 1
        case ["report", *rest]:
            return run_command(report, rest, name="tools report")
        case other:
            print(__doc__)
            return int(other not in (["--help"], ["-h"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
