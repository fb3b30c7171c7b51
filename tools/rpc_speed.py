"""Measures calls between two ranks: `mesh.rpc` beside torch's RPC over TensorPipe, and `send`.

Both systems run in the same two processes, in turns, on one machine; the agent is a third process.
Each line is the median of the rounds. A `send` returns when the receiver's agent has the array; the
receiver's program has it as soon as an answer can come, as for a call. Beside each rate of a large
array stands that rate as a part of `send`'s.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import pmesh
from pmesh.launches.agent.checks import free_ports
from pmesh.testing import agent_in_a_thread
from tools.lab.call import words_for

TEXT = "x" * 100
LARGE = 100_000_000  # bytes
SEND = "pmesh, 100 MB by send, MB/s"
_PEER = 1


def run(rounds: int = 5, calls: int = 2000, in_flight: int = 256) -> None:
    """Calls between two ranks, beside torch's RPC and beside `send`.

    Args:
        rounds: Of each measurement.
        calls: In a round.
        in_flight: At a time, where several are.
    """
    with tempfile.TemporaryDirectory(prefix="pmesh-") as home, agent_in_a_thread(Path(home)):
        environ = {
            **os.environ,
            "PMESH_HOME": home,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
        }
        words = [sys.executable, *words_for(measure, rounds, calls, in_flight)]
        ranks = [subprocess.Popen(words, env={**environ, "RANK": str(rank)}) for rank in range(2)]
        for rank in ranks:
            rank.wait()


def echo(x: object) -> object:
    return x


def take(x: Any) -> int:  # noqa: ANN401 - an array of numpy or torch
    return len(x)


def measure(rounds: int, calls: int, in_flight: int) -> None:
    torch: Any = import_module("torch")
    rpc: Any = import_module("torch.distributed.rpc")
    with pmesh.connect("rpc-speed", 2) as mesh:
        mesh.rpc.register(echo)
        mesh.rpc.register(take)
        ours = np.ones(LARGE // 4, np.float32)

        @mesh.rpc.register
        def give() -> object:
            return ours

        @mesh.rpc.register
        def serve(copy: bool) -> None:  # noqa: FBT001 - it is called by name
            mesh.rpc.serve(copy=copy)

        rank = int(mesh.rank)
        options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4)
        rpc.init_rpc(str(rank), rank=rank, world_size=2, rpc_backend_options=options)
        if rank != _PEER:
            theirs = torch.ones(LARGE // 4)

            def called(function: str, *arguments: object, copy: bool) -> float:
                mesh.rpc.serve(copy=copy)
                mesh.rpc.call(_PEER, "serve", copy)
                return large(lambda: mesh.rpc.call(_PEER, function, *arguments))

            turns: dict[str, Callable[[], float]] = {
                "pmesh, one by one, calls/s": lambda: one_by_one(
                    calls // 4, lambda: mesh.rpc.call(_PEER, "echo", TEXT)
                ),
                "torch, one by one, calls/s": lambda: one_by_one(
                    calls // 4, lambda: rpc.rpc_sync(str(_PEER), echo, (TEXT,))
                ),
                f"pmesh, {in_flight} in flight, calls/s": lambda: many(
                    calls, in_flight, lambda: mesh.rpc.call_async(_PEER, "echo", TEXT)
                ),
                f"torch, {in_flight} in flight, calls/s": lambda: many(
                    calls, in_flight, lambda: rpc.rpc_async(str(_PEER), echo, (TEXT,))
                ),
                "pmesh, 100 MB as an argument, MB/s": lambda: called("take", ours, copy=True),
                "pmesh, the same with copy=False, MB/s": lambda: called("take", ours, copy=False),
                "pmesh, 100 MB as a result, MB/s": lambda: called("give", copy=True),
                "pmesh, its result with copy=False, MB/s": lambda: called("give", copy=False),
                SEND: lambda: large(lambda: mesh.send(ours, _PEER)),
                "pmesh, 100 MB by send, answered, MB/s": lambda: large(
                    lambda: (mesh.send(ours, _PEER), mesh.recv(_PEER))
                ),
                "torch, 100 MB as an argument, MB/s": lambda: large(
                    lambda: rpc.rpc_sync(str(_PEER), take, (theirs,))
                ),
            }
            found: dict[str, list[float]] = {name: [] for name in turns}
            for turn in range(rounds + 1):
                for name, measured in turns.items():
                    value = measured()
                    if turn:  # the first one faults memory in
                        found[name].append(value)
            for name, values in found.items():
                rate = statistics.median(values)
                of_send = rate / statistics.median(found[SEND])
                part = f"{of_send:8.2f}" if name.endswith("MB/s") else ""
                print(f"{name:40} {rate:10.0f}{part}", flush=True)
        else:
            for _ in range(rounds + 1):
                mesh.recv(1 - _PEER)
                mesh.recv(1 - _PEER)
                mesh.send(np.zeros(1), 1 - _PEER)
        mesh.barrier()
        rpc.shutdown()


def one_by_one(calls: int, call: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return calls / (time.perf_counter() - began)


def many(calls: int, in_flight: int, call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    handles: list[Any] = []
    for _ in range(calls):
        if len(handles) == in_flight:
            for handle in handles:
                handle.wait()
            handles.clear()
        handles.append(call())
    for handle in handles:
        handle.wait()
    return calls / (time.perf_counter() - began)


def large(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return LARGE / 1e6 / (time.perf_counter() - began)
