"""What agents receive from each other, lost or changed on its way."""

from collections.abc import Callable

import pytest

from pmesh.core.wire.channels import Channels, Message, encode
from pmesh.ids import Member
from simulation.wire import decode_untrusted


def change_received(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Channels, Member, Message], Message | None]
) -> None:
    """Let agents receive what `change` makes of a message, given their channels and the sender.

    None is a message that is lost.
    """
    real = Channels.receive_untrusted

    def receive(channels: Channels, member: Member, data: bytes) -> None:
        message = change(channels, member, decode_untrusted(data))
        if message is not None:
            real(channels, member, encode(message))

    monkeypatch.setattr(Channels, "receive_untrusted", receive)
