"""The compiled twins of the trainers' kernels, made ready once in a process."""

import threading

from pmesh.compression import twins

PAYS_VALUES = 256 * 1024  # of fewer numpy takes about a millisecond

_lock = threading.Lock()
_threads: list[threading.Thread] = []  # one, once begun


def prepare_twins(count: int, *, wait: bool) -> None:
    """Have them compiled, if so many values are worth it.

    That takes a second, and ten at the first time on a machine; numpy computes meanwhile. The
    thread is no daemon: a program that ends in the middle of it waits for the compiler.

    Args:
        count: values of a call.
        wait: until they are there, for who is about to measure.
    """
    if count < PAYS_VALUES:
        return
    with _lock:
        if not _threads:
            _threads.append(threading.Thread(target=twins.prepare, name="pmesh-compile"))
            _threads[0].start()
    if wait:
        _threads[0].join()
