"""`SimulatedMesh`: ranks in threads and a real agent, without a network, for users' tests."""

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import trio

from pmesh.agent.config import AgentSettings, Listen
from pmesh.agent.limits import MAX_TRAINERS, raise_open_files
from pmesh.agent.run import run_agent
from pmesh.client.connect import OnLoss, connect
from pmesh.client.mesh import Mesh
from pmesh.core.identity.keys import KEY_BYTES, MeshKey, NodeKey
from pmesh.errors import GroupBroken, HistorySuperseded, MeshClosed, RankLost, UsageError

T = TypeVar("T")
_JOB = "simulated"
_MOST = MAX_TRAINERS // 2  # a program may have half of the connections that others leave
_OF_THE_LOST = (MeshClosed, HistorySuperseded)  # which `lose` has caused


class SimulatedMesh:
    """A mesh of `size` ranks, which are threads of this process and call a real `Mesh`.

    Their agent is a real one, in another thread. It and other agents do not find each other.

    >>> SimulatedMesh(3).run(lambda mesh: mesh.rank)
    [0, 1, 2]
    """

    def __init__(self, size: int, *, on_loss: OnLoss = "raise") -> None:
        """Take `on_loss` as `pmesh.connect` does. Raises UsageError if size is not 1 to 64."""
        if not 1 <= size <= _MOST:
            raise UsageError(
                f"a simulated mesh has at least 1 rank and at most {_MOST}, not {size}"
            )
        self._size = size
        self._on_loss: OnLoss = on_loss
        self._latest = Path(), contextlib.ExitStack()
        self._meshes: list[Mesh] = []
        self._lost: set[Mesh] = set()

    def run(self, train: Callable[[Mesh], T]) -> list[T]:
        """Call `train` once for each rank, each in a thread of its own.

        A rank that returns leaves the mesh; a rank that raises is lost. After a loss, ops of other
        ranks raise RankLost, unless `on_loss` is "continue". `run` raises the error of the rank,
        without the RankLost and GroupBroken that it caused. Several different errors are raised as
        an ExceptionGroup.

        Returns:
            The results of the calls in the order of ranks, without ranks that `lose` ended.
        """
        lost: set[Mesh] = set()

        def run_rank(mesh: Mesh) -> T:
            with mesh:
                return train(mesh)

        with (
            tempfile.TemporaryDirectory(prefix="pmesh-") as home,
            contextlib.ExitStack() as leftovers,
            ThreadPoolExecutor(self._size, "simulated-rank") as pool,
            agent_in_a_thread(Path(home)),  # it ends first, so that no rank waits forever
        ):
            joins = [pool.submit(self._join, Path(home), leftovers) for _ in range(self._size)]
            joined, _ = wait(joins, return_when=FIRST_EXCEPTION)
            meshes = sorted((join.result() for join in joined), key=lambda mesh: mesh.rank)
            self._latest, self._meshes, self._lost = (Path(home), leftovers), meshes, lost
            calls = [pool.submit(run_rank, mesh) for mesh in meshes]
            try:
                wait(calls)
            finally:
                self._meshes = []
        errors = [
            e
            for mesh, call in zip(meshes, calls, strict=True)
            if (e := call.exception()) and not (mesh in lost and isinstance(e, _OF_THE_LOST))
        ]
        causes = [e for e in errors if not isinstance(e, RankLost | GroupBroken)] or errors
        different = list({(type(e), str(e)): e for e in causes}.values())
        if len(different) > 1:
            raise BaseExceptionGroup("ranks of a simulated mesh have failed", different)
        if different:
            raise different[0]
        return [call.result() for call in calls if call.exception() is None]

    def connect(self) -> Mesh:
        """Connect another trainer to the current run; it enters in its first `sync`.

        Returns:
            Its mesh, for a thread of your own. It is closed at the end of the run.

        Raises:
            UsageError: `run` is not running.
        """
        if not self._meshes:
            raise UsageError("connect() adds a trainer to a run: call it during run()")
        return self._join(*self._latest)

    def lose(self, rank: int) -> None:
        """Lose a rank of the current run, as by a crash. Its own calls raise MeshClosed.

        Its first message, if just then it opens the connection for that, raises HistorySuperseded.

        Args:
            rank: the rank's number when the run began.

        Raises:
            UsageError: `run` is not running, or began without such a rank.
        """
        if not self._meshes:
            raise UsageError("lose() ends a rank of a run: call it during run()")
        if not 0 <= rank < self._size:
            raise UsageError(f"there is no rank {rank}: there are ranks 0 to {self._size - 1}")
        mesh = self._meshes[rank]
        self._lost.add(mesh)
        mesh.__exit__(RankLost, RankLost("SimulatedMesh.lose"), None)

    def _join(self, home: Path, leftovers: contextlib.ExitStack) -> Mesh:
        mesh = connect(_JOB, self._size, home=home, on_loss=self._on_loss)
        leftovers.callback(mesh.close)
        return mesh


@contextlib.contextmanager
def agent_in_a_thread(home: Path) -> Generator[None]:
    """Run an agent with this home in a thread of this process until the end of the block.

    The agent listens on a loopback address and looks for no other agents. Like `pmesh up`, this
    raises the process's limit of open files, and changes nothing else of the process.
    """
    up: Future[Callable[[], object]] = Future()
    """A function that stops the agent, set once the agent serves trainers."""

    settings = AgentSettings(
        home=home.resolve(),
        name="simulated",
        listen=Listen("127.0.0.1", 0),
        mdns=False,
        find_others_s=0.0,
    )

    async def run() -> None:
        mesh_key = MeshKey(secrets.token_bytes(KEY_BYTES))
        node_key = NodeKey.from_seed(secrets.token_bytes(KEY_BYTES))
        token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as scope:

            def announce(text: str) -> None:
                if "is up" in text and not up.done():
                    up.set_result(lambda: token.run_sync_soon(scope.cancel))

            await run_agent(settings, mesh_key, node_key, announce)

    raise_open_files()
    with ThreadPoolExecutor(1, "simulated-agent") as pool:
        agent = pool.submit(trio.run, run)
        started: list[Future[object]] = [up, agent]  # type: ignore[list-item] # only waited for
        try:
            wait(started, return_when=FIRST_COMPLETED)
            if not up.done():
                agent.result()  # raises the reason why it could not start
            yield
        finally:
            wait(started, return_when=FIRST_COMPLETED)  # Ctrl-C may have interrupted the first wait
            with contextlib.suppress(trio.RunFinishedError):
                if up.done():
                    up.result()()
        agent.result()
