# ruff: noqa: ANN401 - values of any kind
"""Ranks in threads that call each other, and functions that wait for a test."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import pmesh
from pmesh.rpc.wire import INLINE_BYTES
from pmesh.testing import SimulatedMesh
from tests.worlds.scripted_agent import PATIENCE_S

LARGE = np.arange(INLINE_BYTES, dtype=np.int64)  # eight times what goes in its frame
Program = Callable[[pmesh.Mesh], Any]


def endpoint_of(mesh: pmesh.Mesh) -> Any:
    """What sends and receives the calls of a mesh, for what only a faulty rank does with it."""
    return mesh.rpc._endpoint  # noqa: SLF001


def pair(one: Program, other: Program) -> list[Any]:
    """What rank 0 and rank 1 do; both stay until both are done."""

    def rank(mesh: pmesh.Mesh) -> Any:
        result = (one, other)[mesh.rank](mesh)
        mesh.barrier()
        return result

    return SimulatedMesh(2).run(rank)


def echoing(mesh: pmesh.Mesh) -> None:
    @mesh.rpc.register
    def echo(*args: Any, **named: Any) -> Any:
        return args, named


class Gate:
    """Functions that wait for the test."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.may_go = threading.Event()
        self.ran = list[object]()
        self.was_cancelled = threading.Event()

    def register(self, mesh: pmesh.Mesh) -> None:
        @mesh.rpc.register
        def wait(x: object = None) -> object:
            self.ran.append(x)
            self.entered.release()
            assert self.may_go.wait(PATIENCE_S)
            if mesh.rpc.cancelled():
                self.was_cancelled.set()
            return x
