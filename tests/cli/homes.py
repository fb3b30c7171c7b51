"""A home for commands that run in this process, and the agent that they start there."""

import os
import sys
import types
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from pmesh.agent.mesh.keyring import Keyring
from pmesh.cli import up
from pmesh.core.identity.keys import MeshKey, NodeKey
from pmesh.core.identity.rotations import sign_rotation


def store_rotation(home: Path, before: MeshKey, after: MeshKey) -> None:
    """As an agent of this home leaves it that has taken a new mesh key."""
    node_key = NodeKey.from_seed(b"n" * 32)
    keyring = Keyring(home, before, node_key)
    trio.run(keyring.adopt, sign_rotation(node_key, after, [], before=None))


def use_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands use this home, and no other variable of pmesh."""
    for variable in [name for name in os.environ if name.startswith("PMESH_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PMESH_HOME", str(home))


def use_agent(
    run_agent: Callable[..., Awaitable[None]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let `pmesh up` run this instead of an agent; with None, fail if it starts one."""
    module = types.ModuleType("pmesh.agent.run")
    if run_agent is not None:
        module.run_agent = run_agent  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pmesh.agent.run", module)
    monkeypatch.setenv("PMESH_MDNS", "0")  # an agent that is started all the same disturbs nobody
    monkeypatch.setenv("PMESH_LISTEN", "127.0.0.1:0")
    monkeypatch.setattr(up, "set_up_logs", lambda **_: None)  # pytest owns this process's logs
