"""Fuzzing campaign: real agents on loopback, to which a member and a trainer lie.

    $ python -m tools.fuzz --hours 8
    $ python -m tools.fuzz --once tools/fuzz/corpus/member-7.msgpack
    $ python -m tools.fuzz --minutes 3 --coverage

What has broken something is kept in a folder, and tried again first. Exits with 1 after a finding.
"""

import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import cyclopts

from tools.fuzz.campaign import Arena, FindingError
from tools.fuzz.corpus import keep, load
from tools.fuzz.covered import command_under_coverage, report

CORPUS = Path(__file__).parent / "corpus"
app = cyclopts.App(name="fuzz", help=__doc__, help_format="plaintext", version_flags=[])


@app.default
def fuzz(
    *,
    hours: float = 0.0,
    minutes: float = 0.0,
    seed: int = 0,
    once: Path | None = None,
    corpus: Path = CORPUS,
    coverage: Annotated[bool, cyclopts.Parameter(negative="")] = False,
) -> int:
    """Run episodes until the time is over; at least one.

    Args:
        hours: For how long.
        minutes: Added to the hours.
        seed: Of the first episode; each has the next one.
        once: One kept case, and nothing else.
        corpus: Where findings are kept.
        coverage: Report what the liars reach of the code that handles messages. Slower: no lag is
            judged.
    """
    deadline = time.monotonic() + 3600 * hours + 60 * minutes
    cases = [once] if once else sorted(corpus.glob("*.msgpack"))
    findings = episodes = 0
    with tempfile.TemporaryDirectory(prefix="pmesh-fuzz-coverage-") as data:
        runner = command_under_coverage(Path(data)) if coverage else ()
        with Arena(runner) as arena:
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
            print(f"{episodes} episodes, {findings} findings; at worst {worst}")
        if coverage:
            print("\n".join(report(Path(data))))
    return 1 if findings else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app()
