"""Programs that end while a thread of ours comes back from C++ again and again, as ops do."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from pmesh.client.calls import threads
from pmesh.client.calls.queue import Handle, Line
from pmesh.torch.work import MessageWork


class Computes:
    """An op under way, until it is told to end."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._told = False

    def begin(self, start: Callable[[], object]) -> None:
        """Have it run by a thread, and make the program's end interrupt it."""
        threads.at_end(self.interrupt)
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
    may_go_on = threading.Event()
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
    called = Future[None]()

    def call_back(future: "torch.futures.Future[list[torch.Tensor]]") -> None:
        called.set_result(None)
        may_go_on.wait()
        for _ in range(50):
            torch.ones(300, 300) @ torch.ones(300, 300)

    works[1].get_future().then(call_back)
    called.result()
    group: Any = dist.group.WORLD
    leave = group._end

    def leave_and_let_go_on() -> None:
        leave()
        may_go_on.set()

    group._end = leave_and_let_go_on
    dist.destroy_process_group()
    assert not [each for each in threading.enumerate() if each.name.startswith("pmesh")]
