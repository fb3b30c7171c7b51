"""Descriptions of what ranks do: the call of an op, and an array that is sent."""

from typing import Annotated

import msgspec
from msgspec import Meta

from pmesh.core.values import MAX_TRAINERS, Name

_Index = Annotated[int, Meta(ge=0, le=MAX_TRAINERS - 1)]
"""A rank in a call: a job has at most 1024."""


_Shape = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**48)], ...], Meta(max_length=64)]
"""numpy supports at most 64 dimensions; no processor can address 2^48 values."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """The call of an op by one rank; all ranks must make the same call (I5, O8)."""

    kind: Name
    dtype: Name
    shape: _Shape
    reduction: Name = ""
    root: Annotated[int, Meta(ge=-1, le=MAX_TRAINERS - 1)] = -1
    compression: Name = ""
    tree: Name = ""
    """For a bucket of a tree: a digest of all its paths, shapes and dtypes, because different
    trees may have buckets of the same size (I5)."""
    receivers: Annotated[tuple[_Index, ...], Meta(max_length=MAX_TRAINERS)] = ()
    """In a broadcast: the ranks that lack the root's values; if empty, all but the root."""
    strategy: Name = ""
    """The strategy of an all-reduce, from `pmesh.core.ops.cost`; if empty, the costs decide."""

    def __str__(self) -> str:
        words = [
            word for word in (self.reduction, self.compression, self.strategy, self.tree) if word
        ]
        words += [f"root={self.root}"] * (self.root >= 0)
        words += [f"to={self.receivers}"] * bool(self.receivers)
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.kind}({', '.join([self.dtype, shape, *words])})"


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The description of an array that one rank sends to another, without its values (O4)."""

    tag: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """It matches only a receive with the same tag."""
    dtype: Name
    shape: _Shape
    nbytes: Annotated[int, Meta(ge=0, le=2**48)]
