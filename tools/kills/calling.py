"""What a rank of `call-kills` does: it calls functions of all ranks and holds objects there.

A round begins whenever the job is whole again after a kill. The rank waits for the end of all of
its calls, lets its objects go, prints what is left, and begins as many anew. It writes down at once
what it has run and how each of its calls has ended, so that a kill leaves that, too.
"""

import contextlib
import gc
import json
import os
import random
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pmesh
from pmesh.rpc.client.calls import RemoteCall, RemoteObject

JOB = "calls"
PAUSE_S = 0.3  # at most, of one call: so many wait for a thread, and take no time of two cores
THREADS = 4  # of each rank, that serve
TURN_S = 0.05  # between two looks at the calls, and at the job
LARGE = 5_000  # float64 values: more than goes in a frame
CANCELLED = 0.05  # the share of calls that the caller gives up
APART = 0.05  # the share with a large array
HELD = 0.1  # the share that goes to an object
PATIENCE_S = 60.0  # for the end of calls; it is that of a call, too

RAN = np.dtype([("call", "<u8")])
ENDED = np.dtype([("call", "<u8"), ("outcome", "u1")])
DONE, LOST, GIVEN_UP, CUT_OFF = range(4)

LOST_ERRORS = (pmesh.RankLost,)
CUT_OFF_ERRORS = (pmesh.HistorySuperseded, pmesh.AgentStopped, pmesh.AgentNotRunning)


def number_of(process: int, turn: int, count: int) -> int:
    """A call's own number in the whole campaign."""
    return process << 40 | turn << 24 | count


def turn_of(call: int) -> int:
    """The round in which a call of this number began."""
    return call >> 24 & 0xFFFF


class Journal:
    """Writes down each call that runs here, and the end of each that was made here."""

    def __init__(self, folder: Path, process: int) -> None:
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY
        self._ran = os.open(folder / f"{process}.ran", flags)
        self._ended = os.open(folder / f"{process}.ended", flags)

    def ran(self, call: int) -> None:
        os.write(self._ran, np.array([(call,)], RAN).tobytes())

    def ended(self, call: int, outcome: int) -> None:
        os.write(self._ended, np.array([(call, outcome)], ENDED).tobytes())


class KeptObject:
    """An object that other ranks hold."""

    remote_methods = ("touch",)

    def __init__(self, touch: Any) -> None:  # noqa: ANN401 - a function
        self._touch = touch

    def touch(self, call: int, pause_s: float) -> list[int]:
        found: list[int] = self._touch(call, pause_s)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class UnderWay:
    """A call that has not ended."""

    number: int
    handle: RemoteCall
    array: NDArray[np.float64] | None = None
    """Its argument, if it has a large one."""
    held: RemoteObject | None = None
    """The object whose method it is."""


class CallsInFlight:
    """One rank's calls: so many under way, and so many objects held, until it lands."""

    def __init__(self, mesh: pmesh.Mesh, folder: Path, process: int, in_flight: int) -> None:
        self._mesh = mesh
        self._process = process
        self._journal = Journal(folder, process)
        self._in_flight = in_flight - in_flight // 5
        self._holds = in_flight // 5
        self._dice = random.Random(process)  # noqa: S311 - no secret
        self._kept = weakref.WeakSet[KeptObject]()
        self._objects: list[RemoteObject] = []
        self._calls: list[UnderWay] = []
        self._turn, self._count = 0, 0
        self._landing = threading.Event()
        self._flight: threading.Thread | None = None
        self.is_full = threading.Event()
        self.lost_at: list[float] = []
        """When a call has ended as its rank was lost, this round."""
        self.wrong: list[str] = []
        mesh.rpc.serve(THREADS)
        mesh.rpc.register(self._pause, name="pause")
        mesh.rpc.register(self._add_one, name="add_one")
        mesh.rpc.register(self._keep, name="keep")

    # --- what is called

    def _pause(self, call: int, pause_s: float) -> list[int]:
        self._journal.ran(call)
        time.sleep(pause_s)
        return [call, self._process]

    def _add_one(self, call: int, x: NDArray[np.float64]) -> NDArray[np.float64]:
        self._journal.ran(call)
        return x + 1

    def _keep(self, call: int) -> KeptObject:
        self._journal.ran(call)
        kept = KeptObject(self._pause)
        self._kept.add(kept)
        return kept

    # --- a round

    def fly(self, turn: int) -> None:
        """Begin calls, and go on with new ones."""
        self._turn, self._count = turn, 0
        self.lost_at.clear()
        self._landing.clear()
        self.is_full.clear()
        self._flight = threading.Thread(target=self._fly, name="flight")
        self._flight.start()

    def land(self) -> int:
        """End all calls, and let all objects go; return how many calls were under way."""
        self._landing.set()
        if self._flight is not None:
            self._flight.join()
        under_way = len(self._calls)
        deadline = time.monotonic() + PATIENCE_S
        while self._calls and time.monotonic() < deadline:
            self._sweep()
            time.sleep(TURN_S / 5)
        self.wrong += [f"call {call.number:x} has not ended" for call in self._calls]
        self._calls.clear()
        self._objects.clear()
        return under_way

    def left(self) -> dict[str, int]:
        """Wait until nothing of calls is left here; return what is nevertheless."""
        deadline = time.monotonic() + PATIENCE_S
        while any((found := self._counted()).values()) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(TURN_S)
        return {what: count for what, count in found.items() if count}

    def _counted(self) -> dict[str, int]:
        endpoint: Any = self._mesh.rpc._endpoint  # pyright: ignore[reportPrivateUsage]
        serving = endpoint.serving
        return {
            "objects": len(self._kept),
            "objects by number": len(serving._objects),
            "references": serving._service.held,
            "calls served": len(serving._service) + len(serving._incoming),
            "calls made": len(endpoint._calls) + len(endpoint._pending),
            "threads": max(rpc_threads() - THREADS - 1, 0),
        }

    def _fly(self) -> None:
        with ThreadPoolExecutor(max(self._holds, 1)) as pool:
            makers: list[Any] = []
            while not self._landing.is_set():
                self._sweep()
                while len(self._calls) < self._in_flight and self._begin():
                    pass
                makers = [each for each in makers if not each.done()]
                missing = self._holds - len(self._objects) - len(makers)
                makers += [pool.submit(self._hold) for _ in range(missing)]
                if not makers and len(self._calls) == self._in_flight:
                    self.is_full.set()
                    if self._objects and self._dice.random() < HELD:
                        self._objects.pop(self._dice.randrange(len(self._objects)))
                self._landing.wait(TURN_S)

    def _next(self) -> int:
        self._count += 1
        return number_of(self._process, self._turn, self._count)

    def _begin(self) -> bool:
        """Begin a call; return False if this is no time for calls."""
        call, kind = self._next(), self._dice.random()
        pause_s = self._dice.uniform(0, PAUSE_S)
        array, held = None, None
        try:
            rank = self._dice.randrange(self._mesh.size)
            if kind < APART:
                array = np.full(LARGE, float(call % 1000))
                handle = self._mesh.rpc.call_async(rank, "add_one", call, array)
            elif kind < APART + HELD and self._objects:
                held = self._dice.choice(self._objects)
                handle = held.call_async("touch", call, pause_s)
            else:
                handle = self._mesh.rpc.call_async(rank, "pause", call, pause_s)
        except pmesh.PmeshError as e:
            self._journal.ended(call, self._outcome(e))
            return False
        if self._dice.random() < CANCELLED:
            handle.cancel()
        self._calls.append(UnderWay(call, handle, array, held))
        return True

    def _hold(self) -> None:
        call = self._next()
        try:
            made = self._mesh.rpc.remote(
                self._dice.randrange(self._mesh.size), "keep", call, timeout_s=PATIENCE_S
            )
        except pmesh.PmeshError as e:
            self._journal.ended(call, self._outcome(e))
            self._landing.wait(TURN_S)
        else:
            self._journal.ended(call, DONE)
            self._objects.append(made)

    def _sweep(self) -> None:
        """Take what has ended. Objects of ranks that are lost are made anew elsewhere."""
        ended = [call for call in self._calls if call.handle.done()]
        self._calls = [call for call in self._calls if call not in ended]
        for call in ended:
            try:
                self._check(call, call.handle.wait())
                outcome = DONE
            except pmesh.PmeshError as e:
                outcome = self._outcome(e)
                if outcome != GIVEN_UP and call.held in self._objects:
                    self._objects.remove(call.held)
            self._journal.ended(call.number, outcome)

    def _check(self, call: UnderWay, result: Any) -> None:  # noqa: ANN401 - of any kind
        if call.array is None:
            is_right = result[0] == call.number
        else:
            is_right = np.array_equal(result, call.array + 1)
        if not is_right:
            self.wrong.append(f"call {call.number:x} has another one's result")

    def _outcome(self, error: pmesh.PmeshError) -> int:
        if isinstance(error, LOST_ERRORS):
            self.lost_at.append(time.monotonic())
            return LOST
        if isinstance(error, CUT_OFF_ERRORS):
            return CUT_OFF
        is_cancelled = isinstance(error, pmesh.OpTimedOut) and "cancelled" in str(error)
        is_outdated = isinstance(error, pmesh.UsageError) and "no rank" in str(error)
        if not (is_cancelled or is_outdated):
            self.wrong.append(f"{type(error).__name__}: {error}")
        return GIVEN_UP


def rpc_threads() -> int:
    return sum(each.name.startswith("pmesh-rpc") for each in threading.enumerate())


def arenas() -> int:
    """How many arenas are mapped here."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/maps").read_text().count("pmesh-")
    return 0


def tell(**facts: object) -> None:
    os.write(1, (json.dumps(facts) + "\n").encode())


def call(folder: str, process: int, ranks: int, in_flight: int, rounds: int) -> None:
    """One rank; it ends after so many rounds.

    Args:
        folder: Where the journals are.
        process: Its number; each process of the campaign has its own.
        ranks: How many make the job whole.
        in_flight: Calls and objects of this rank, together.
        rounds: How often the job becomes whole.
    """
    with pmesh.connect(JOB, ranks) as mesh:
        caller = CallsInFlight(mesh, Path(folder), process, in_flight)
        state = {"round": 0}
        before: Sequence[object] = ()
        returns = 0
        told = -1
        while True:
            try:
                state = mesh.sync(state)
                everyone = mesh.all_gather_object([process, returns])
            except pmesh.RosterChanged:
                continue
            except CUT_OFF_ERRORS:
                returns += 1  # so that all see that another round begins, if nobody was missed
                time.sleep(TURN_S)
                continue
            if len(everyone) == ranks and everyone != before:
                under_way = caller.land()
                mesh.barrier()
                tell(
                    landed=state["round"],
                    under_way=under_way,
                    lost_at=max(caller.lost_at, default=None),
                    lost=len(caller.lost_at),
                    left=caller.left(),
                    wrong=caller.wrong[:5],
                    arenas=arenas(),
                )
                caller.wrong.clear()
                mesh.barrier()
                state["round"] += 1
                if state["round"] > rounds:
                    break
                caller.fly(state["round"])
                before = everyone
            if told < state["round"] and caller.is_full.is_set():
                told = state["round"]
                tell(flies=told)
            time.sleep(TURN_S)
    del caller
    deadline = time.monotonic() + PATIENCE_S
    while (rpc_threads() or arenas()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(TURN_S)
    tell(closed=True, threads=rpc_threads(), arenas=arenas())
