"""What a terminal shows of an error: the user's lines, and one of ours."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pmesh
from pmesh.testing import SimulatedMesh
from tests.worlds.watched_agent import WatchedAgent

OURS = str(Path(pmesh.__file__).parent)


def our_frames(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.name for frame in frames if frame.filename.startswith(OURS)]


CALLS: dict[str, Callable[[pmesh.Mesh], object]] = {
    "all_reduce": lambda mesh: mesh.all_reduce("text"),
    "async": lambda mesh: mesh.all_reduce(np.ones(mesh.rank + 1), async_op=True).wait(),
    "average_gradients": lambda mesh: mesh.average_gradients([np.ones(2)], weight=-1),
    "gather": lambda mesh: mesh.gather(np.ones(2), root=7),
    "send": lambda mesh: mesh.send(np.ones(2), 9),
    "shard": lambda mesh: mesh.shard(-1),
    "store": lambda mesh: mesh.store.get("nothing", timeout_s=0.01),
    "sync": lambda mesh: mesh.sync(object()),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_error_shows_one_line_of_ours(call: Callable[[pmesh.Mesh], object]) -> None:
    def train(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.PmeshError) as caught:
            call(mesh)
        assert our_frames(caught.value) == ["call"]
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__

    SimulatedMesh(2).run(train)


def test_connect_without_an_agent_prints_a_few_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import pmesh\npmesh.connect('job')\n")
    home = tmp_path / "home"
    ended = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"PMESH_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = ended.stderr.splitlines()
    assert sum(OURS in line for line in lines) == 1
    assert lines[-1].startswith("pmesh.errors.AgentNotRunning: no agent listens at ")
    assert "direct cause" not in ended.stderr


def test_ctrl_c_in_a_call_shows_one_line_of_ours_and_the_next_call_what_to_do(
    agent: WatchedAgent,
) -> None:
    mesh = pmesh.connect("job", home=agent.home)
    agent.before_op = lambda _session, _request: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        mesh.all_reduce(np.ones(2))
    assert our_frames(caught.value) == ["call"]
    with pytest.raises(
        pmesh.MeshClosed,
        match=r"this mesh has ended: KeyboardInterrupt; call pmesh.connect\(\) again",
    ):
        mesh.barrier()
