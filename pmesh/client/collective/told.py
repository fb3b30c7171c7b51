"""What ranks tell each other about themselves, checked."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pmesh.errors import PeerError

_Said = TypeVar("_Said", bound=msgspec.Struct)


def read_untrusted(
    told: Sequence[object], kind: type[_Said], names: Sequence[str], about: str
) -> list[_Said]:
    """Return what each rank has told all others by `all_gather_object`.

    Args:
        told: what has come, of each rank.
        kind: what each must be.
        names: the machine of each rank.
        about: of what it tells, for the error.

    Raises:
        PeerError: A rank has sent something that no pmesh sends.
    """
    said: list[_Said] = []
    for rank, each in enumerate(told):
        try:
            said.append(msgspec.convert(each, kind))
        except msgspec.ValidationError as e:
            raise PeerError(
                f"rank {rank} ({names[rank]}) says of {about} what no pmesh says: {e}; "
                "install the same version of pmesh there"
            ) from e
    return said
