"""The commands that decide which machines are in the mesh, and their options."""

from typing import Annotated

from cyclopts import Parameter

from pmesh.cli.options import Flag, Home, Several


def invite(*, home: Home = None) -> int:
    """Show a code by which another machine joins this mesh, once, within ten minutes."""
    from pmesh.invites.cli.invite import show_invitation

    return show_invitation(home)


def join(
    *code: Annotated[str, Parameter(show_default=False)],
    peer: str | None = None,
    up: Flag = False,
    replace: Flag = False,
    home: Home = None,
) -> int:
    """Get the mesh key from the machine that shows this code: 'pmesh join 7-guitar-lemon'.

    Args:
        code: What 'pmesh invite' shows; default it asks for it.
        peer: HOST:PORT of that machine, for networks without multicast.
        up: Then start the agent in the background, as 'pmesh up --detach' does.
        replace: Leave the mesh whose key this machine holds; the key is kept beside. The agent must
            not run.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.up import bring_up
    from pmesh.invites.cli.join import join_mesh

    join_mesh(home, code, peer=peer, then_up=up, replace=replace)
    peers = None if peer is None else (peer,)
    return bring_up(home, {"peers": peers}, detach=True) if up else 0


def members(*, json: Flag = False, home: Home = None) -> int:
    """List the machines of the mesh: who is here, who is away, who was removed.

    Args:
        json: Print one line of JSON.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.members import show_members

    return show_members(home, as_json=json)


def remove(name: str, /, *, undo: Flag = False, home: Home = None) -> int:
    """Shut a machine out of the mesh, at once on all that are here, later on the others.

    Args:
        name: As 'pmesh members' shows it, or the id.
        undo: Let it in again.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.members import remove_machine

    return remove_machine(home, name, undo=undo)


def rotate(*, without: Several = (), home: Home = None) -> int:
    """Give the mesh a new key: all members get it, those that are away once they are back.

    Args:
        without: A machine that is removed, and gets no key; may be repeated.
        home: The agent's home directory; default PMESH_HOME, else ~/.pmesh.
    """
    from pmesh.cli.members import rotate_key

    return rotate_key(home, without)
