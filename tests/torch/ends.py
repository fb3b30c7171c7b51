"""Programs that end while a thread of ours comes back from C++ again and again, as ops do."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from pmesh.client.calls import threads
from pmesh.client.calls.queue import Handle, Line
from pmesh.torch.work import MessageWork
from tests.worlds.polling import await_poll_of_main_thread


class Computes:
    """An op under way, until it is told to end."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._told = False

    def begin(self, start: Callable[[], object]) -> None:
        """Have it run by a thread, and make the program's end interrupt it."""
        threads.at_end(self, Computes.interrupt)
        start()
        self._begun.wait()

    def interrupt(self) -> None:
        self._told = True

    def run(self, *_: object) -> None:
        x = torch.ones(200, 200)
        while not self._told:
            self._begun.set()
            x @ x


OP = Computes()


def of_a_line() -> None:
    line = Line()
    OP.begin(lambda: line.submit(OP.run))


def of_a_message() -> None:
    handle = Handle[None](lambda: False, lambda _: None)
    work = MessageWork(handle, OP.run, [])
    OP.begin(work.get_future)


def callbacks_end_before_the_group(rank: int) -> None:
    """What is called back in a thread is over once the group is destroyed."""
    dist.init_process_group("pmesh")
    group: Any = dist.group.WORLD
    has_callback, may_go_on = threading.Event(), threading.Event()
    group._line.submit(has_callback.wait)  # so no op has ended before its callback is known
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
    called = Future[None]()

    def call_back(future: "torch.futures.Future[list[torch.Tensor]]") -> None:
        called.set_result(None)
        may_go_on.wait()
        for _ in range(50):
            torch.ones(300, 300) @ torch.ones(300, 300)

    works[1].get_future().then(call_back)
    has_callback.set()
    called.result()
    leave = group._end

    def leave_and_let_go_on() -> None:
        leave()
        may_go_on.set()

    group._end = leave_and_let_go_on
    dist.destroy_process_group()
    assert not [each for each in threading.enumerate() if each.name.startswith("pmesh")]


def a_worker_is_killed_in_a_call(rank: int) -> None:
    """The call raises torch's error on its rank, and takes place; the mesh goes on."""
    dist.init_process_group("pmesh")
    store: Any = dist.distributed_c10d._get_default_store()
    me = dist.get_rank()
    if me == 0:
        loader = iter(DataLoader(list(range(8)), num_workers=1))
        next(loader)
        (worker,) = multiprocessing.active_children()

        def kill() -> None:
            await_poll_of_main_thread()
            os.kill(worker.pid or 0, signal.SIGKILL)
            os.waitid(os.P_PID, worker.pid or 0, os.WEXITED | os.WNOWAIT)  # it stays for torch
            store.set("killed", "")

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(RuntimeError, match=r"DataLoader worker .* is killed by signal"):
            dist.all_reduce(torch.ones(1))
        killer.join()
    else:
        store.wait(["killed"])
        dist.all_reduce(torch.ones(1))
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == dist.get_world_size()
    dist.destroy_process_group()
