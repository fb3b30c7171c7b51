"""Messages of the session in which a trainer joins a job and makes collective calls."""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.core.values import Comparison, Reports, Terms, Verdict, View
from pmesh.core.wire.calls import Call
from pmesh.core.wire.session import (
    AnyVersion,
    ArenaGone,
    ArenaGranted,
    ArenaOrNone,
    DropArena,
    JobText,
    Refused,
    Seconds,
    SessionDecoder,
    SessionMessage,
    TrainerNumber,
    TrainerNumbers,
    WantArena,
)
from pmesh.ids import PRINTABLE, OpNumber, TrainerId

SYNC_VALUES = 13
"""The number of int64 that each rank gives to a `sync`; its result has as many for each rank."""


MAX_ROW_VALUES = 4096
MAX_COMPRESSION_TEXT = 256
ENTERS = -1
"""Instead of an op's number: the next `sync` of the job, in which the trainer enters it."""


_MOST = 2**48  # bytes or values: no processor can address as many, and sums of 1024 fit an int64
WireDtype: TypeAlias = Literal[
    "complex128",
    "float64",
    "complex64",
    "float32",
    "int64",
    "uint64",
    "int32",
    "uint32",
    "int16",
    "uint16",
    "int8",
    "uint8",
    "bool",
]
"""Numpy's names; of each kind the widest first."""


_Amount = Annotated[int, Meta(ge=0, le=_MOST)]
_Amounts = Annotated[tuple[_Amount, ...], Meta(max_length=1024)]


class GroupOf(msgspec.Struct, frozen=True, array_like=True):
    """The ranks of another job that form this job, a group."""

    job: JobText
    members: TrainerNumbers
    trainer: TrainerNumber
    """The one that connects."""


class Connect(SessionMessage, frozen=True, tag="connect"):
    """A trainer joins a job; answered by Joined or Refused, with StillWaiting between."""

    version: AnyVersion
    job: JobText
    wait_for: Annotated[int, Meta(ge=1, le=1024)]
    timeout_s: Seconds
    program: Annotated[str, Meta(max_length=256, pattern=PRINTABLE)]
    """The name of the program, for `pmesh status`."""
    terms: Terms = Terms()
    straggler_after_s: Seconds = 60.0
    """How long the others wait for this trainer while its process is stopped."""
    group_of: GroupOf | None = None
    """Set if the job is a group. It can no longer begin once one of these ranks is lost, or got an
    error from the call that forms the group."""
    place: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    """Its rank among those that `pmesh run` has started, which it has if the job begins with it and
    the ring has not changed since; -1 for none."""


class StartOp(SessionMessage, frozen=True, tag="start_op", omit_defaults=True):
    """A collective call; answered by OpDone or OpFailed with the same number."""

    op: Annotated[OpNumber, Meta(ge=ENTERS, le=2**63 - 1)]
    """ENTERS for the `sync` in which the trainer enters its job, or comes back to it (O6)."""
    call: Call
    """`shape` is that of the user's array; the arena holds it flat, in `wire_dtype`."""
    wire_dtype: WireDtype
    count: _Amount
    """The values of this rank; if there are `parts`, they decide. See `pmesh.core.ops.kinds`."""
    arena: ArenaOrNone
    """The input arena, filled; -1 when this rank has no input (a broadcast's other ranks)."""
    timeout_s: Seconds
    parts: _Amounts = ()
    """The number of values for each rank, stored one after another: what each rank gives to a
    `gather` or `all_gather`, what each gets of a `scatter` or `reduce_scatter`, and what this rank
    gives to each in an `all_to_all`."""
    parts_in: _Amounts = ()
    """In an `all_to_all`: the number of values that this rank gets from each."""
    residual: ArenaOrNone = -1
    """In a compressed all-reduce: an input arena with `count` float32 that are added to this rank's
    values; -1 for none."""
    residual_out: ArenaOrNone = -1
    """Another such arena: each attempt writes its rounding errors there; -1 drops them."""
    offset: _Amount = 0
    """The start of the values in the input arena, in bytes: a multiple of the size of a value."""
    borrows: bool = False
    """True if the trainer wants to keep the result in place until DropArena."""
    follows: bool = False
    """True if the trainer has sent it without waiting for the answer to the request before: it is
    void, and has no answer, if that op fails. Until then the results before are not overwritten."""
    step: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """How often the trainer has synced with this one, for `pmesh status`; of torch its steps."""
    share_percent: Annotated[int, Meta(ge=-1, le=100)] = -1
    """The rank's share of a batch until now, for `pmesh status`; -1 for none."""


class Compresses(SessionMessage, frozen=True, tag="compresses"):
    """How the trainer compresses values from now on, for `pmesh status`; no answer."""

    text: Annotated[str, Meta(max_length=MAX_COMPRESSION_TEXT, pattern=PRINTABLE)]


class ReportsNumbers(SessionMessage, frozen=True, tag="reports"):
    """What the trainer has reported last, sent with a request that it makes anyway; no answer."""

    reports: Reports


class ComparesStates(SessionMessage, frozen=True, tag="compares"):
    """What the trainer has found in an op in which all ranks compared their states; no answer."""

    found: Comparison


class Leave(SessionMessage, frozen=True, tag="leave"):
    """The trainer ends on purpose; without it a closed socket is a crash."""


class World(msgspec.Struct, frozen=True):
    """The ranks of a job as a trainer sees them; after an op, its contributors (O5)."""

    rank: int
    """-1 if the trainer has not entered the job yet, or is no longer in it."""
    trainers: tuple[TrainerId, ...]
    """By rank; a trainer keeps its number while ranks change."""
    names: tuple[str, ...]
    """By rank, the name of the machine."""


class Joined(SessionMessage, frozen=True, tag="joined"):
    """The job begins with a committed roster, or already runs and the trainer may enter it (O6)."""

    world: World
    """Its rank is -1 if the job already runs: then the first op must be a `sync`."""
    view: View
    compression: Annotated[str, Meta(max_length=64)] = ""
    """The default compression of gradients; empty for none."""


class OpDone(SessionMessage, frozen=True, tag="op_done", omit_defaults=True):
    """The result lies in an output arena until the next op ends; if lent, until DropArena."""

    op: OpNumber
    arena: int
    """-1 if there is nothing to read (a barrier, no values, a broadcast's root)."""
    world: World | None = None
    """If it has changed: the contributors of the result, and the ranks from now on (O5)."""
    clipped: int = 0
    """In a compressed all-reduce: the number of finite values clipped to the largest of fp16."""
    lent: bool = False
    """Only if the trainer wants to borrow it and has not borrowed too much already."""


class OpFailed(SessionMessage, frozen=True, tag="op_failed"):
    """The op failed with the same verdict at all ranks."""

    op: OpNumber
    verdict: Verdict
    consumed: bool = True
    """False if this reports the failure of an earlier op (I5); this number is not used up."""
    world: World | None = None
    """If it has changed: the ranks from now on (O5)."""


class StillWaiting(SessionMessage, frozen=True, tag="still_waiting"):
    """Sent every 10 s while a call waits, with the time and the ranks waited for (I6)."""

    op: int
    """-1 while the job has not begun: then it is sent each second, and `on` says all of it."""
    waited_s: float
    on: tuple[str, ...]
    """Sentences for a person: on whom it waits, or in which step it is."""


class RanksLost(SessionMessage, frozen=True, tag="ranks_lost"):
    """Sent before the reply of the call in which ranks were lost, or of the first after they left.

    Not where a loss raises: there the reply says it.
    """

    losses: tuple[str, ...]
    """A sentence for each."""


TrainerRequest: TypeAlias = (
    Connect | WantArena | DropArena | StartOp | Compresses | ReportsNumbers | ComparesStates | Leave
)
TrainerReply: TypeAlias = (
    Joined | Refused | ArenaGranted | ArenaGone | OpDone | OpFailed | StillWaiting | RanksLost
)
TRAINER_REQUESTS: SessionDecoder[TrainerRequest] = SessionDecoder("request", TrainerRequest)
TRAINER_REPLIES: SessionDecoder[TrainerReply] = SessionDecoder("reply", TrainerReply)
