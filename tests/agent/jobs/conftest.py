"""What tests of calls that are repeated need."""

import pytest

from pmesh.agent.jobs import session
from pmesh.agent.jobs.ranks import LocalRank
from pmesh.core.wire.trainer import StartOp
from pmesh.net.lanes import persistent
from tests.agent.jobs.repeating import OpsInPython
from tests.worlds.faults import Faults, Real


@pytest.fixture(params=["apart", "together"])
def in_python(request: pytest.FixtureRequest, faults: Faults) -> OpsInPython:
    """The numbers of the ops that an agent's Python runs; the library answers the others."""
    faults.limit(persistent, "MOST_WAIT_S", 30.0)  # a busy machine is no late rank
    ops = OpsInPython()
    ops.where = request.param

    async def note(real: Real, rank: LocalRank, request: StartOp, *others: object) -> object:
        ops.append(request.op)
        return await real(rank, request, *others)

    faults.watch(session, "run_op", note)
    return ops
