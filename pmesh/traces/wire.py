"""What agents ask each other of the latest ops of their ranks, and what `pmesh trace` asks."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pmesh.core.jobs.op_times import OpTime
from pmesh.core.links.clocks import KEPT, Reading
from pmesh.core.wire.channels import Channel, Message
from pmesh.core.wire.session import JobText, Refused, SessionDecoder, SessionMessage, TrainerNumber

MOST_SECONDS = 3600.0  # the ranks keep 16,384 ops each, however long these took
MOST_TIMES = 1024  # ops in one answer
MAX_ANSWER_BYTES = 160 * 1024  # whatever the fields are; of an honest agent at most half of it
MAX_CHANGES = 250  # the last ones, of 500 characters each

_Count = Annotated[int, Meta(ge=0, le=2**62)]
_Seconds = Annotated[float, Meta(gt=0, le=MOST_SECONDS)]


class Cursor(msgspec.Struct, frozen=True, array_like=True, order=True):
    """How far one who asks has come: all ranks of a machine are told in the order of these."""

    job: JobText
    run: _Count
    """The counter of the epoch in which the job began: others of its name have others."""
    trainer: TrainerNumber
    count: _Count
    """How many ops this rank had ended, up to the last one that was told."""


class RankOps(msgspec.Struct, frozen=True, array_like=True):
    """Ops of one rank, in the order in which they ended."""

    last: Cursor
    """The rank, and its last op here."""
    rank: Annotated[int, Meta(ge=-1, le=2**31 - 1)]
    """Its rank when its last op of all ended; -1 if it had none any more."""
    pid: Annotated[int, Meta(ge=-1, le=2**62)]
    """Of its process: the ranks that one process has in groups have the same."""
    times: Annotated[tuple[OpTime, ...], Meta(min_length=1, max_length=MOST_TIMES)]


class AskOps(Message, frozen=True, tag=62):
    """Asks for ops that ended lately; answered by TellOps with the same number."""

    channel = 9
    question: _Count
    job: JobText
    """Its groups are meant, too."""
    seconds: _Seconds
    after: Cursor | None = None
    """The `last` of the answer before; None to begin."""


class TellOps(Message, frozen=True, tag=63):
    """The next ops; None after the last ones."""

    channel = 9
    most_bytes = MAX_ANSWER_BYTES
    question: _Count
    ops: RankOps | None


TracesMessage: TypeAlias = AskOps | TellOps
TRACES: Channel[TracesMessage] = Channel(AskOps.channel, TracesMessage)


class AskTrace(SessionMessage, frozen=True, tag="ask_trace"):
    """Asks for the latest ops of all ranks; answered by Refused, or TracedOps and Traced."""

    job: JobText
    seconds: _Seconds


class TracedOps(SessionMessage, frozen=True, tag="traced_ops"):
    """Ops of one rank."""

    machine: Annotated[int, Meta(ge=0)]
    """Its place in `Traced.machines`."""
    ops: RankOps


class TracedMachine(msgspec.Struct, frozen=True):
    """A machine of the view, and its clock."""

    name: str
    me: bool
    """True for the one that was asked, by whose clock all is told."""
    clock: Annotated[tuple[Reading, ...], Meta(max_length=KEPT)]
    why_not: str = ""
    """Why its ops are not there, or not all of them."""


class TracedEvent(msgspec.Struct, frozen=True):
    """An event of the job, or of the mesh, as the machine that was asked has seen it."""

    at_us: int
    took_us: int
    """0 for what has only happened; else `at_us` is its end."""
    kind: str
    text: str


class Traced(SessionMessage, frozen=True, tag="traced"):
    """The end of a trace. All times are microseconds of this agent's monotonic clock."""

    version: str
    """Of pmesh."""
    until_us: int
    """When the trace was asked for."""
    machines: tuple[TracedMachine, ...]
    changes: Annotated[tuple[TracedEvent, ...], Meta(max_length=MAX_CHANGES)]


TraceReply: TypeAlias = Refused | TracedOps | Traced
TRACE_REPLIES: SessionDecoder[TraceReply] = SessionDecoder("reply", TraceReply)
