"""One node key seen twice: a copied home is named, what only looks like one is let in."""

import shutil
import signal
import socket

import pytest

from tests.e2e.harness import Fleet, StartedAgent

pytestmark = pytest.mark.slow

# An agent that has imported all it needs, and starts when it is told to.
ON_SIGNAL = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # first: threads of imports inherit it
import pmesh.agent.run
print("ready", flush=True)
signal.sigwait([signal.SIGUSR1])
"""


def copied(agent: StartedAgent) -> list[str]:
    """The reasons that its status gives for copied node keys."""
    return [p.reason or "" for p in agent.status().peers if p.state == "node_key_copied"]


def copy_home(fleet: Fleet, agent: StartedAgent, name: str) -> None:
    """The key by which an agent is known, under another name."""
    fleet.home(name).mkdir(mode=0o700)
    shutil.copy2(agent.home / "node_key", fleet.home(name) / "node_key")


def test_a_copied_home_is_named_and_the_first_stays(fleet: Fleet) -> None:
    one, two = fleet.start_ring("mac-1", "mac-2")
    copy_home(fleet, two, "copy")
    view = one.status().view.epoch

    copy = fleet.start_agent("copy", "--no-mdns", "--peer", one.address, "--peer", two.address)

    # At the one it met third, and at both that share the key; both machines' names in each.
    for agent in (one, two, copy):
        agent.process.await_line("NodeKeyCopied.*")
        agent.await_status(lambda _, agent=agent: bool(copied(agent)))  # type: ignore[misc]
        (reason,) = copied(agent)
        assert "mac-2" in reason
        assert "copy" in reason
    assert one.status().view.epoch == view
    assert [member.name for member in copy.status().view.members] == ["copy"]


def test_a_restarted_agent_is_not_taken_for_a_copied_home(fleet: Fleet) -> None:
    one, two = fleet.start_ring("mac-1", "mac-2")
    incarnation = two.status().node.incarnation

    two.process.send_signal(signal.SIGKILL)
    again = fleet.start_agent("mac-2", "--no-mdns", "--peer", one.address)
    fleet.await_view(one, again)
    assert again.status().node.incarnation != incarnation

    # Also when nobody knows yet that the old one is gone, as if its cable had been pulled.
    copy_home(fleet, again, "mac-2-on-a-new-disk")
    options = ("--no-mdns", "--peer", one.address)
    third = fleet.start_agent("mac-2-on-a-new-disk", *options, patch=ON_SIGNAL)
    third.process.await_line("^ready")
    again.process.send_signal(signal.SIGSTOP)
    third.process.send_signal(signal.SIGUSR1)
    fleet.await_view(one, third)

    one.process.await_line("mac-2 is gone: its connection broke")
    one.process.await_line("mac-2 joined")
    one.process.await_line("mac-2 is gone: (it was restarted|silent for)")
    one.process.await_line("mac-2-on-a-new-disk joined")
    for agent in (one, third):
        assert "NodeKeyCopied" not in agent.process.output
        assert {peer.state for peer in agent.status().peers} == {"linked"}


def test_an_agent_that_dials_itself_is_not_taken_for_a_copied_home(fleet: Fleet) -> None:
    """As happens where all machines have the same list of peers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"

    agent = fleet.start_agent("mac-1", "--no-mdns", "--peer", address, listen=address)

    # Nobody else knows it, so it was itself; and then it gives up wanting that peer.
    agent.await_status(lambda status: status.door.authenticated > 0 and not status.peers)
    assert agent.address == address
    assert "no link" not in agent.process.output
