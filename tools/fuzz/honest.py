"""An honest trainer: its results are right, or it has an error; a line for every few ops.

$ python -m tools.fuzz.honest RANKS QUORUM [JOB]

In another job than its own it does not count, and only uses the store: a liar has a rank there.
"""

import sys
import time
from typing import cast

import numpy as np

import pmesh
from pmesh.client.connect import Quorum
from pmesh.errors import PmeshError

JOB = "honest"
SAY_EVERY = 10
PAUSE_S = 0.02  # two cores are for all
SHARED = "shared"


def main() -> int:
    """Add ones until stopped; 3 if a sum is wrong."""
    quorum = cast("Quorum", sys.argv[2])
    job = sys.argv[3] if len(sys.argv) > 3 else JOB  # noqa: PLR2004
    with pmesh.connect(job=job, wait_for=int(sys.argv[1]), quorum=quorum) as mesh:
        print("joined", flush=True)
        while job != JOB:
            mesh.store.add("calls")
            time.sleep(10 * PAUSE_S)
        while True:
            total = mesh.all_reduce(np.ones(1000, np.float32))
            op = mesh.last_op
            assert op is not None  # noqa: S101 - one has just ended
            ranks = len(op.contributors)
            if not (total == ranks).all():
                print(f"WRONG at op {op.op}: {set(total)} from {op.names}")
                return 3
            if op.op % SAY_EVERY == 0:
                mesh.store.set("op", str(op.op).encode())
                print(f"op {op.op} of {ranks}", flush=True)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PmeshError as e:
        print(f"ERROR {type(e).__name__}: {e}", flush=True)
