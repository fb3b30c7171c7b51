"""Programs over MLX's own ring, to compare with."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ATTEMPTS = 3


def run_over_mlxs_ring(
    words: Sequence[str], *, ranks: int, folder: Path, timeout_s: float
) -> list[str]:
    """Run a program on so many ranks of this machine; returns what each has printed.

    MLX's ring hangs in a few of a hundred trainings (mlx #4475), and its ports, which were free,
    may have been taken: then all is done again, a few times.

    Args:
        words: the arguments of Python.
        ranks: how many.
        folder: for the file of their addresses.
        timeout_s: for how long one attempt is waited for.

    Raises:
        AssertionError: no attempt has ended well.
    """
    failures = list[str]()
    for _ in range(ATTEMPTS):
        try:
            return _run_once(words, ranks, folder, timeout_s)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as e:
            failures.append(str(e))
    raise AssertionError(f"MLX's ring has failed each time: {failures}")


def _run_once(words: Sequence[str], ranks: int, folder: Path, timeout_s: float) -> list[str]:
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps(_free_addresses(ranks)))
    own = os.environ | {"MLX_HOSTFILE": str(hosts), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *words]
    running = [
        subprocess.Popen(
            command, env=own | {"MLX_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        printed = [each.communicate(timeout=timeout_s)[0] for each in running]
    finally:
        for each in running:
            each.kill()
            each.communicate()
    for each in running:
        if each.returncode:
            raise subprocess.CalledProcessError(each.returncode, command)
    return printed


def _free_addresses(ranks: int) -> list[list[str]]:
    """MLX's ring takes its ports from a file, so they are free now and, mostly, a moment later."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    addresses = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    for each in sockets:
        each.close()
    return addresses
