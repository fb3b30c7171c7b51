"""Fuzzing campaign: real agents on loopback, to which a member and a trainer lie."""

import json
import resource
import tempfile
import time
from pathlib import Path

import coverage as coverage_py

from tools.fuzz.campaign import PATIENCE_S, FindingError, FuzzedMesh
from tools.fuzz.corpus import keep, load
from tools.lab.commands import Flag

CORPUS = Path(__file__).parent / "corpus"
# Folders and modules below pmesh that handle messages.
HANDLERS = (
    *("agent/jobs/", "agent/lanes/", "agent/mesh/", "core/jobs/", "core/views/"),
    *("core/wire/", "launches/wire/", "net/links/", "net/sessions/sessions", "p2p/", "store/wire"),
)


def fuzz(
    *,
    hours: float = 0.0,
    minutes: float = 0.0,
    seed: int = 0,
    patience: float = PATIENCE_S,
    once: Path | None = None,
    corpus: Path = CORPUS,
    coverage: Flag = False,
) -> int:
    """Run episodes until the time is over; at least one. Exits with 1 after a finding.

    What has broken something is kept in a folder, and tried again first.

    Args:
        hours: For how long.
        minutes: Added to the hours.
        seed: Of the first episode; each has the next one.
        patience: How many seconds agents have to meet again; a busy machine needs more.
        once: One kept case, and nothing else.
        corpus: Where findings are kept.
        coverage: Report what the liars reach of the code that handles messages. Slower: no lag is
            judged.
    """
    deadline = time.monotonic() + 3600 * hours + 60 * minutes
    cases = [once] if once else sorted(corpus.glob("*.msgpack"))
    findings = episodes = 0
    with tempfile.TemporaryDirectory(prefix="pmesh-fuzz-coverage-") as data:
        runner = ("-m", "coverage", "run", "--branch", "-p", f"--data-file={data}/of")
        with FuzzedMesh(runner if coverage else (), patience_s=patience) as arena:
            while cases or not episodes or (not once and time.monotonic() < deadline):
                replay = cases.pop(0) if cases else None
                number = load(replay).seed if replay else seed
                seed += replay is None
                episodes += 1
                try:
                    arena.run(number, replay=replay)
                except FindingError as e:
                    findings += 1
                    print(f"FINDING in episode {episodes}, seed {number}: {e}", flush=True)
                    if replay is None:
                        for liar in ("member", "trainer"):
                            file = keep(corpus, arena.case(liar, number, str(e)))
                            print(f"kept as {file}", flush=True)
                    arena.end_all()
        worst = ", ".join(f"{name} {value:,.0f}" for name, value in arena.worst.items())
        print(
            f"{episodes} episodes in {_processor_s() / 3600:.2f} hours of processor time, "
            f"{findings} findings; at worst {worst}"
        )
        if coverage:
            print("\n".join(_report(Path(data))))
    return 1 if findings else 0


def _processor_s() -> float:
    """Return what this process and those that it has ended have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _report(data: Path) -> list[str]:
    """What the liars reach of the code that handles messages; the least covered first."""
    measured = coverage_py.Coverage(data_file=str(data / "of"))
    measured.combine([str(data)])
    with tempfile.NamedTemporaryFile("r", suffix=".json", encoding="utf-8") as file:
        measured.json_report(outfile=file.name)
        content = json.load(file)
    rows = list[tuple[float, str]]()
    for path, found in content["files"].items():
        module = path.partition("pmesh/")[2].removesuffix(".py")
        if module.startswith(HANDLERS):
            summary = found["summary"]
            branches = f"{summary['covered_branches']}/{summary['num_branches']} branches"
            row = f"{module:26}{summary['percent_covered']:5.0f} %  {branches}"
            rows.append((summary["percent_covered"], row))
    return [row for _, row in sorted(rows)]
