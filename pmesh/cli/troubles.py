"""What is wrong with the mesh, in sentences for `pmesh status` and `pmesh doctor`."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.text import Text

from pmesh.agent.schema import HeldOffStatus, MemberStatus, Status
from pmesh.ids import shared_name
from pmesh.texts import printable

STALL_S = 0.5  # as long as a peer on a wire may be silent without being called late
BAD_LOSS_PERCENT = 1.0  # crowded Wi-Fi; a line that is well loses a hundredth of it


def describe_troubles(status: Status) -> Iterator[Text]:
    """Yield a line for each thing that is wrong here, on a path, or with a machine."""
    members = status.view.members
    if status.node.without_native is not None:
        from pmesh import native  # noqa: PLC0415 - ctypes, for a rare line

        works = native.describe(printable(status.node.without_native))
        yield Text(f"! this agent works {works}", "yellow")
    if status.node.slow_encryption is not None:
        from pmesh.core.wire import aead  # noqa: PLC0415 - the cipher itself, for a rare line

        slow = aead.describe(printable(status.node.slow_encryption))
        yield Text(f"! this agent {slow}", "yellow")
    for text in describe_names(members):
        yield Text(text)
    for text in describe_slow_paths(members):
        yield Text(f"! {text}", "yellow")
    for text in (*describe_bad_links(members), *describe_held_off(status.held_off)):
        yield Text(text, "yellow")


def describe_slow_paths(members: Sequence[MemberStatus]) -> Iterator[str]:
    """Say which paths are slower than they should be."""
    for member in members:
        for path in member.paths:
            if path.slow is not None:
                yield f"{printable(member.name)}: {printable(path.slow)}"


def describe_bad_links(members: Sequence[MemberStatus]) -> Iterator[str]:
    """Say which links lose packets or stand still now and then, and what follows."""
    for member in members:
        found: list[str] = []
        if member.loss_percent is not None and member.loss_percent >= BAD_LOSS_PERCENT:
            found.append(f"had to send {member.loss_percent:.1f} % of its packets again")
        if member.silence_s is not None and member.silence_s >= STALL_S:
            found.append(f"was silent for {member.silence_s:.1f} s lately")
        if found:
            yield (
                f"the link to {printable(member.name)} {' and '.join(found)}; "
                "training waits for it each time"
            )


def describe_held_off(those: Sequence[HeldOffStatus]) -> Iterator[str]:
    """Say which machines were lost so often that they must wait."""
    for one in those:
        yield (
            f"{printable(one.name)} was lost {one.losses} times lately; "
            f"it is let back in in {math.ceil(one.back_in_s)} s"
        )


def describe_names(members: Sequence[MemberStatus]) -> Iterator[str]:
    """Say which machines have one name: their view appends to each the start of its id."""
    names = Counter(
        name
        for member in members
        if shared_name(name := member.name.rpartition(" (")[0], member.id) == member.name
    )
    for name, count in names.items():
        if count > 1:
            text = f"{count} machines are called '{name}'; start one with 'pmesh up --name OTHER'"
        else:
            text = (
                f"another machine had the name '{name}' before; if it is the same one, reinstalled,"
                f" type: pmesh forget {shlex.quote(name)}"
            )
        yield printable(text)
