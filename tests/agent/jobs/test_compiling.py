import errno
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from pmesh.agent.jobs.session import Compiler
from pmesh.compression.codecs import Cast, Int8
from tests.agent.jobs.buckets import Bucket, reduce_buckets
from tests.worlds.trainer import until
from tests.worlds.village import village
from tests.worlds.village_ops import kinds_of_events, reduce_all


async def test_what_an_op_uses_is_compiled_once_in_another_thread_while_ops_go_on(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    here_thread, compiled, done = threading.get_ident(), list[str](), threading.Event()

    def prepare(codec: Int8 | Cast) -> bool:
        assert threading.get_ident() != here_thread
        compiled.append(codec.name)
        return done.wait(20)

    for kind in (Int8, Cast):
        monkeypatch.setattr(kind, "prepare", prepare)
    async with village(clock, 1) as here:
        trainers = await here.job(here.machines[0])
        await reduce_all(trainers)
        assert compiled == []
        xs = [np.ones(10, np.float32)]
        buckets = [Bucket(trainer, 10) for trainer in trainers]
        for name in ("int8", "bf16", "int8", "randomk(0.5)"):
            await reduce_buckets(buckets, xs, name, "sum")
        await trainers[0].leave()  # and waits for no compiler
    done.set()
    assert sorted(compiled) == ["bf16", "int8"]


@contextmanager
def uncontained(
    what: str,
    on_error: Callable[[str], None] | None = None,
    *,
    passing: tuple[type[Exception], ...] = (),
) -> Generator[None]:
    del what, on_error, passing
    yield


async def test_a_codec_that_there_is_not_ends_nothing() -> None:
    async with trio.open_nursery() as nursery:
        Compiler(nursery, uncontained).want("int9")


async def test_a_compiler_that_fails_ends_no_session(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba reads and writes files, for which there may be no descriptor left."""

    def prepare(_: Int8) -> bool:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Int8, "prepare", prepare)
    async with village(clock, 1) as here:
        machine = here.machines[0]
        (trainer,) = await here.job(machine)
        with capture_logs() as logs:
            await reduce_buckets([Bucket(trainer, 10)], [np.ones(10, np.float32)], "int8", "sum")
            await until(lambda: "internal error" in kinds_of_events(machine))
        assert [entry["what"] for entry in logs] == ["the compilation of int8"]
        await reduce_all([trainer])
