"""The commands of a user's first minutes, from no mesh key to two machines and back."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import Any

import psutil
import pytest

from pmesh.agent.schema import decode_status
from tests.e2e.harness import TIMEOUT_S, Fleet, StartedAgent
from tools.lab.mesh import inherited

pytestmark = pytest.mark.slow

SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "status.schema.json"
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


@pytest.fixture
def two_homes(fleet: Fleet) -> Iterator[tuple[StartedAgent, Path]]:
    """An agent that was started without a mesh key, and the home of a detached one."""
    first = fleet.start_agent("mac-1", "--no-mdns", mesh_key="")
    home = fleet.home("mac-2")
    yield first, home
    if (home / "agent.lock").exists() and (pid := (home / "agent.lock").read_text().strip()):
        psutil.Process(int(pid)).kill()  # the test has failed: nobody else ends what is detached


def test_from_a_first_up_without_a_key_to_two_machines_and_back(
    fleet: Fleet, two_homes: tuple[StartedAgent, Path]
) -> None:
    first, home = two_homes

    # The first start makes a key, which it does not print.
    first.process.await_line("^This machine begins a new mesh.* type here: pmesh invite$")
    key = fleet.pmesh("key", "show", home=first.home).stdout.strip()
    assert key not in first.process.output
    taken = fleet.pmesh("key", "set", home=home, piped=f"{key}\n")
    assert (taken.returncode, taken.stderr) == (0, "")
    assert fleet.pmesh("key", "show", home=home).stdout == f"{key}\n"

    # In the background.
    options = ("--no-mdns", "--listen", "127.0.0.1:0", "--name", "mac-2", "--peer", first.address)
    up = fleet.pmesh("up", "--detach", *options, home=home)
    assert up.returncode == 0, up.stderr
    pid = int(re.findall(r"pid (\d+), log", up.stdout)[0])
    first.process.await_line("^mac-2 joined")
    refused = fleet.pmesh("up", "--detach", home=home)
    assert refused.returncode == 1
    assert f"AgentAlreadyRunning: an agent already runs in {home}: pid {pid};" in refused.stderr

    # What it looks like, for a person and for a program.
    text = fleet.pmesh("status", home=home).stdout
    assert "mac-1" in text
    assert "mac-2" in text
    printed = fleet.pmesh("status", "--json", home=home).stdout
    schema = json.loads(SCHEMA.read_text())
    check(json.loads(printed), schema, schema["$defs"])
    assert decode_status(printed.encode()).pid == pid

    # Again and again, until Ctrl-C.
    watching = [
        fleet.start_command("status", "--watch", home=home),
        fleet.start_command("status", "--watch", home=home, FORCE_COLOR="1"),  # as on a terminal
        fleet.start_command("status", "--watch", "--json", home=home),
    ]
    for watch in watching:
        for _ in range(2):
            watch.await_line(r"mac-1.*healthy|2 machines: .*all are well")
        watch.send_signal(signal.SIGINT)
    for watch in watching:
        assert "Traceback" not in watch.await_end(code=0)

    down = fleet.pmesh("down", home=home)
    assert down.stdout == f"The agent has left the mesh (pid {pid}).\n"
    assert not psutil.pid_exists(pid)
    assert first.process.await_line("^mac-2 is gone: (.*)")[1] == "its agent was stopped"
    gone = fleet.pmesh("status", home=home)
    assert gone.returncode == 1
    assert gone.stderr.startswith("AgentNotRunning: ")


def check(value: object, rule: dict[str, Any], definitions: dict[str, Any]) -> None:
    """That the value is what the rule of the JSON schema says: the keywords that ours uses."""
    if "$ref" in rule:
        check(value, definitions[rule["$ref"].rpartition("/")[2]], definitions)
    if "enum" in rule:
        assert value in rule["enum"]
    kinds = [kind["type"] for kind in rule.get("anyOf", [rule]) if "type" in kind]
    assert not kinds or any(isinstance(value, TYPES[kind]) for kind in kinds)
    if isinstance(value, list):
        for item in value:
            check(item, rule["items"], definitions)
    if isinstance(value, dict) and "properties" in rule:
        assert set(rule["required"]) <= set(value) <= set(rule["properties"])
        for name, part in value.items():
            check(part, rule["properties"][name], definitions)


def test_top_shows_in_a_terminal_what_a_training_reports_until_q_is_pressed(fleet: Fleet) -> None:
    (agent,) = fleet.start_ring("mac-1")
    trainer = fleet.start_trainer(
        agent,
        """
        import signal
        import pmesh
        with pmesh.connect("digits") as mesh:
            while mesh.step < 3:
                mesh.report(loss=0.5)
                mesh.sync(None)
            print("trained", flush=True)
            signal.pause()
        """,
    )
    trainer.await_line("trained")
    ours, theirs = os.openpty()
    top = subprocess.Popen(
        [sys.executable, "-m", "pmesh.cli", "top"],
        env=inherited() | {"PMESH_HOME": str(agent.home), "TERM": "xterm", "NO_COLOR": "1"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    with top, os.fdopen(ours, "rb", buffering=0) as screen:
        try:
            await_text(screen, "Job digits", ": step 3", "; loss ", "0.5")
            os.write(ours, b"q")
            await_text(screen, "\x1b[?1049l")  # the screen from before is back
            assert top.wait(TIMEOUT_S) == 0
        finally:
            top.kill()


def await_text(screen: RawIOBase, *texts: str) -> None:
    """Read what a terminal shows until these have come, one after the other."""
    shown, deadline = "", time.monotonic() + TIMEOUT_S
    for text in texts:
        while text not in shown:
            ready, _, _ = select.select([screen], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} has not come; {shown[-2000:]!r} has"
            shown += (screen.read(65536) or b"").decode(errors="replace")
        shown = shown.partition(text)[2]
