"""`pmesh up --detach`: an agent that outlives its terminal."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pmesh.agent.own_files import open_own_file
from pmesh.cli.terminal import complain, say
from pmesh.client.control import ask_status
from pmesh.errors import AgentNotRunning, AgentStopped

START_TIMEOUT_S = 15.0  # imports on a slow, cold disk take 5 s
_POLL_INTERVAL_S = 0.05


def start_detached(
    command: Sequence[str], *, environment: Mapping[str, str], socket: Path, log: Path
) -> int:
    """Start the command in a session of its own; returns when an agent answers at the socket.

    Its output goes to the end of the log. Where it fails to start, what it wrote is shown, and its
    exit code is returned.

    Raises:
        AgentStopped: It neither answers nor ends; it has been killed.
        ConfigError: The log can't be written, or is not this user's own.
    """
    descriptor = open_own_file(log, os.O_APPEND)
    with open(descriptor, "wb") as output:  # noqa: PTH123 - a descriptor has no path
        begin = os.fstat(descriptor).st_size
        process = subprocess.Popen(  # noqa: S603 - our own program
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=log.parent,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = log.read_bytes()[begin:].decode(errors="replace")
            sys.stderr.write(said)
            if not said:  # where the disk is full, not even the reason can be written
                complain(f"the agent ended, and could not say why in {log}; 'pmesh up' shows it")
            return process.returncode or 1  # it should have stayed
        if _answers(socket):
            process.returncode = 0  # nobody will wait for it; Popen would warn of that
            say(f"The agent runs: pid {process.pid}, log {log}")
            return 0
        time.sleep(_POLL_INTERVAL_S)
    process.kill()
    process.wait()
    raise AgentStopped(f"the agent did not start within {START_TIMEOUT_S:g} s; see {log}")


def _answers(socket: Path) -> bool:
    try:
        ask_status(socket, timeout_s=1.0)
    except (AgentNotRunning, AgentStopped):
        return False
    return True
