"""What the liars reach of the code that handles messages, statements and branches."""

import json
import tempfile
from pathlib import Path

import coverage

HANDLERS = (
    *("core/agreement", "core/proposals", "core/rosters", "core/op_outcomes", "core/quorum"),
    *("core/messages", "core/validation", "agent/peers", "agent/membership", "agent/jobs"),
    *("agent/marks", "agent/lane_desk", "agent/endpoint", "agent/mail_sessions"),
    *("agent/trainers", "agent/ops", "net/sessions", "net/links"),
)


def command_under_coverage(data: Path) -> tuple[str, ...]:
    """What stands before `-m MODULE`."""
    return ("-m", "coverage", "run", "--branch", "-p", f"--data-file={data / 'of'}")


def report(data: Path) -> list[str]:
    """A line for each handler, the least covered first."""
    measured = coverage.Coverage(data_file=str(data / "of"))
    measured.combine([str(data)])
    with tempfile.NamedTemporaryFile("r", suffix=".json", encoding="utf-8") as file:
        measured.json_report(outfile=file.name)
        content = json.load(file)
    rows = list[tuple[float, str]]()
    for path, found in content["files"].items():
        module = path.partition("pmesh/")[2].removesuffix(".py")
        if module in HANDLERS:
            summary = found["summary"]
            branches = f"{summary['covered_branches']}/{summary['num_branches']} branches"
            row = f"{module:22}{summary['percent_covered']:5.0f} %  {branches}"
            rows.append((summary["percent_covered"], row))
    return [row for _, row in sorted(rows)]
