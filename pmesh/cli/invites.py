"""`pmesh invite` and `pmesh join`, and their options."""

from typing import Annotated

from cyclopts import Parameter

from pmesh.cli.options import Home
from pmesh.cli.up import bring_up
from pmesh.invites.cli.invite import show_invitation


def invite(*, home: Home = None) -> int:
    """Show a code by which another machine joins this mesh, once, within ten minutes."""
    return show_invitation(home)


def join(
    *code: Annotated[str, Parameter(show_default=False)],
    peer: str | None = None,
    up: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    home: Home = None,
) -> int:
    """Get the mesh key from the machine that shows this code: 'pmesh join 7-guitar-lemon'.

    Args:
        code: What 'pmesh invite' shows; default it asks for it.
        peer: HOST:PORT of that machine, for networks without multicast.
        up: Then start the agent in the background, as 'pmesh up --detach' does.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.invites.cli.join import join_mesh  # noqa: PLC0415 - 0.3 s: zeroconf, trio

    join_mesh(home, code, peer=peer, then_up=up)
    peers = None if peer is None else (peer,)
    return bring_up(home, {"peers": peers}, detach=True) if up else 0
