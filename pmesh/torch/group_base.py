"""The base of the process group: the methods that torch needs, and how ops run."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from pmesh.client.calls.queue import Handle, Line
from pmesh.client.elastic.place import Place
from pmesh.client.group import Collectives
from pmesh.errors import (
    AgentStopped,
    GroupBroken,
    HistorySuperseded,
    MeshClosed,
    OpTimedOut,
    PmeshError,
    RankLost,
    RosterChanged,
)
from pmesh.torch.library import Tensor, TensorList, TorchStore, dist, torch
from pmesh.torch.work import MessageWork, Work

T = TypeVar("T")

_ENDS = (RankLost, GroupBroken, RosterChanged, HistorySuperseded, AgentStopped, MeshClosed)
"""After these errors the group no longer has all the ranks that torch counts on."""
_FIXED = (
    "torch fixes the number of ranks: start all of them again, from your checkpoint, or let the "
    "others train on by pmesh.torch.init(elastic=True)"
)
_DONE: "Future[None]" = Future()
_DONE.set_result(None)


class GroupBase(dist.ProcessGroup):  # type: ignore[misc] # torch has no types here
    """A group's names, timeouts and numbers, and how its ops run; a subclass has the ops."""

    def __init__(
        self,
        calls: Collectives,
        store: TorchStore,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        name: str = "",
        split: "Callable[[Sequence[int]], GroupBase | None]",
        end: Callable[[], None],
    ) -> None:
        """`split` makes a group of some ranks of this one; `end` leaves this one."""
        super().__init__(rank, size)  # pyright: ignore[reportUnknownMemberType]
        self._calls = calls
        self._store = store
        self._timeout_s = timeout.total_seconds()
        self._name, self._desc = name, "undefined"
        self._split, self._end = split, end
        self._line = Line()
        self._lost = ""
        self._sequence = 0
        self._since_coalescing: list[Work] | None = None

    # --- methods that torch calls

    def getBackendName(self) -> str:  # noqa: N802 - C++ calls this name
        """Return the backend's name."""
        return "pmesh"

    def _get_backend_name(self) -> str:
        return "pmesh"

    def name(self) -> str:
        """Return the backend's name."""
        return "pmesh"

    @property
    def group_name(self) -> str:
        """The name by which functional collectives find the group."""
        return self._name

    pg_name = group_name

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)  # pyright: ignore[reportUnknownMemberType]

    def getGroupName(self) -> str:  # noqa: N802 - C++ calls this name
        """Return the group's name."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - C++ calls this name
        """Set the group's name."""
        self._name = name

    @property
    def group_desc(self) -> str:
        """The group's description."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802 - C++ calls this name
        """Return the group's description."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - C++ calls this name
        """Set the group's description."""
        self._desc = desc

    def get_group_store(self) -> TorchStore:
        """Return the group's store."""
        return self._store

    def _get_backend(self, device: object) -> "GroupBase":
        del device  # this group serves all devices
        return self

    @property
    def _device_types(self) -> list[Any]:
        """This machine's devices; the CPU is first, since torch puts objects on the first one."""
        here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        return [torch.device(name) for name in ("cpu", *(each for each in here if here[each]))]

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of each op that has none of its own."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout
    supports_splitting = True

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> "GroupBase | None":
        """Return a group of these ranks, in this order; None if this rank is not one of them."""
        del opts, device_types
        made = self._split(list(new_ranks))
        if made is not None:
            made.setGroupName(group_name or f"{self._name}:{list(new_ranks)}")
            made.setGroupDesc(group_desc or self._desc)
            if timeout is not None:
                made.set_timeout(timeout)
        return made

    def shutdown(self) -> None:
        """Leave the group and end its threads; ops that have not ended fail."""
        self._line.end()
        self._end()
        self._line.join()

    def abort(self) -> None:
        """Leave the group; every later call fails."""
        self._lost = self._lost or "the process group was aborted"
        self.shutdown()

    # --- what samplers ask

    @property
    def computed_s(self) -> float:
        """How long this rank has computed since it joined: without its waits for ops."""
        return self._place.own_s

    def show_step(self, step: int, share_percent: int) -> None:
        """Show in `pmesh status` how many steps this rank has begun, and its share of a batch."""
        self._place.show_step(step, share_percent)

    def report(self, values: Mapping[str, object]) -> None:
        """Show these numbers of a step in `pmesh status`; see `Mesh.report`."""
        self._place.report(values)

    @property
    def _place(self) -> Place:
        return self._calls._place  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    # --- coalescing

    def _start_coalescing(self, device: object) -> None:
        del device
        self._since_coalescing = []

    def _end_coalescing(self, device: object) -> Work:
        del device
        works, self._since_coalescing = self._since_coalescing or [], None

        def wait_for_all() -> None:
            for work in works:
                work.wait()

        tensors = [tensor for work in works for tensor in work.tensors]
        if not works:
            return Work(_DONE, tensors)
        line = Line()
        done = line.submit(wait_for_all)
        line.end()
        return Work(done, tensors)

    # --- how ops run

    def _message(
        self,
        name: str,
        begin: Callable[[], Handle[T]],
        x: Tensor,
        finish: Callable[[T], int],
    ) -> Work:
        with _shown(name, [x]):
            handle = self.guarded(begin)

        mode = _inference_mode()

        def take(seconds: float | None) -> int:
            arrived = self.guarded(lambda: handle.wait(seconds))
            with mode():
                return self.guarded(lambda: finish(arrived))

        return self._note(MessageWork(handle, take, [x]))

    def _run(
        self,
        name: str,
        options: Any,  # noqa: ANN401 - torch's
        run: Callable[[float], None],
        shown: TensorList,
        results: TensorList,
    ) -> Work:
        """Run an op here if the caller waits for it and no other op runs; else in the thread."""
        given_s = options.timeout.total_seconds()
        seconds = given_s if given_s > 0 else self._timeout_s
        self._sequence += 1
        with _shown(name, shown):
            self._place.begin_beside()
            if not getattr(options, "asyncOp", True) and self._line.idle:
                self.timed(lambda: run(seconds))
                return Work(_DONE, results)
            done = self._line.submit(Queued(self, run, seconds, _inference_mode()))
        return self._note(Work(done, results))

    def timed(self, call: Callable[[], None], *, has_begun: bool = False) -> None:
        """Call as `guarded` does, and note that the op has ended."""
        try:
            self.guarded(call, has_begun=has_begun)
        finally:
            self._place.end_beside()

    def _note(self, work: Work) -> Work:
        if self._since_coalescing is not None:
            self._since_coalescing.append(work)
        return work

    def guarded(self, call: Callable[[], T], *, has_begun: bool = False) -> T:
        """Call, and turn errors into those of torch; after a lost rank, repeat the first error."""
        if self._lost and not has_begun:
            raise dist.DistBackendError(self._lost)
        try:
            return call()
        except _ENDS as e:
            what_to_do = f"; {_FIXED}" if isinstance(e, (RankLost, GroupBroken)) else ""
            self._lost = self._lost or f"{type(e).__name__}: {e}{what_to_do}"
            raise dist.DistBackendError(self._lost) from e
        except PmeshError as e:
            late = " Timed out :" if isinstance(e, OpTimedOut) else ""  # torch's own words
            raise dist.DistBackendError(f"{type(e).__name__}:{late} {e}") from e


@dataclass(slots=True, eq=False)
class Queued:
    """An op that another thread runs."""

    group: GroupBase
    run: Callable[[float], None]
    timeout_s: float
    mode: Callable[[], AbstractContextManager[object]]
    """Gives the thread the inference mode of the caller's."""
    rest: Callable[[], None] | None = None
    """What is left to do, if an op before it has begun this one, too."""

    def __call__(self) -> None:
        """Run it to its end. What has begun is ended, whatever has become of the group."""
        with self.mode():
            if self.rest is None:
                self.group.timed(partial(self.run, self.timeout_s))
            else:
                self.group.timed(self.rest, has_begun=True)


def _inference_mode() -> Callable[[], AbstractContextManager[object]]:
    """Return a context manager that gives another thread the inference mode of this one."""
    enabled = torch.is_inference_mode_enabled()
    return torch.inference_mode if enabled else nullcontext


def _shown(name: str, tensors: TensorList) -> AbstractContextManager[object]:
    """Record the op in torch.profiler, with the shapes of its inputs."""
    if not torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001 - the public way is slow
        return nullcontext()
    record = torch._C._profiler._RecordFunctionFast  # noqa: SLF001 - only this takes shapes
    shown: AbstractContextManager[object] = record(f"pmesh:{name}", list(tensors))
    return shown
