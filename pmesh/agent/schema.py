"""The versioned schema of `pmesh status --json`.

`python tools/status_schema.py` writes docs/reference/status.schema.json from these structs. Fields
may be added under one version; a reader ignores unknown fields. A field that is removed or changes
its meaning needs a new version.
"""

from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from pmesh.core.jobs.reports import NotFinite
from pmesh.errors import UsageError
from pmesh.ids import shared_name

T = TypeVar("T", bound=Struct)

SCHEMA_VERSION: Literal[2] = 2
_JSON_SCHEMA = "https://json-schema.org/draft/2020-12/schema"
OTHER_MESH: Final = (
    "it holds another mesh key; if it should be in this mesh, type here: pmesh invite; and there: "
    "pmesh down, then pmesh join --replace --up with the code"
)

MemberHealth: TypeAlias = Literal["self", "healthy", "degraded", "suspect", "gone"]
PeerState: TypeAlias = Literal[
    "connecting",
    "linked",
    "unreachable",
    "refused",
    "other_mesh_key",
    "other_version",
    "node_key_copied",
]
PathUse: TypeAlias = Literal["in use", "standby", "silent"]
JobState: TypeAlias = Literal["waiting", "running", "below_min_ranks", "no_quorum"]


class _Part(Struct, frozen=True, kw_only=True):
    pass


class NodeStatus(_Part, frozen=True, kw_only=True):
    """The agent that was asked."""

    id: Annotated[str, Meta(description="The node id in base32, 52 characters.")]
    name: str
    incarnation: Annotated[
        str, Meta(description="16 hexadecimal digits: JSON numbers are not exact beyond 2^53.")
    ]
    addresses: Annotated[tuple[str, ...], Meta(description="HOST:PORT, where others can dial it.")]
    compression: Annotated[
        str | None,
        Meta(description="Of gradients, where a trainer here does not say it; null: none."),
    ] = None
    without_native: Annotated[
        str | None,
        Meta(description="Why the agent has no native library, and what to do; null: it has it."),
    ] = None
    slow_encryption: Annotated[
        str | None,
        Meta(description="Why lanes are encrypted slowly, and what to do; null: they are not."),
    ] = None


class EpochStatus(_Part, frozen=True, kw_only=True):
    """The name of a view; compared by counter, then leader, then incarnation."""

    counter: int
    leader: str
    incarnation: str


class PathStatus(_Part, frozen=True, kw_only=True):
    """One way from the agent that was asked to a member, over which both have a connection."""

    interface: Annotated[str | None, Meta(description="The local one; null if it is not known.")]
    remote: Annotated[str, Meta(description="The member's interface, or its address there.")]
    kind: Annotated[
        str | None,
        Meta(description="thunderbolt, wired, wifi, loopback or vpn: the worse of both ends."),
    ]
    use: PathUse
    speed_mbit_s: Annotated[
        int | None, Meta(description="The lower of what both interfaces claim; null if unknown.")
    ] = None
    mbit_s: Annotated[
        int | None, Meta(description="Measured, in the slower direction; null while unknown.")
    ] = None
    rtt_ms: Annotated[float | None, Meta(description="null while unknown.")] = None
    loss_percent: Annotated[
        float | None, Meta(description="Of the TCP segments sent over it, those sent again.")
    ] = None
    slow: Annotated[
        str | None, Meta(description="Why it is slower than it should be, and what to do.")
    ] = None


class MemberStatus(_Part, frozen=True, kw_only=True):
    """One member of the view."""

    id: str
    name: str
    rank: Annotated[
        int,
        Meta(description="Its place in the ring, from 0; it sends to the next, the last to 0."),
    ]
    health: MemberHealth
    rtt_ms: Annotated[
        float | None,
        Meta(description="From the agent that was asked; null for itself and while unknown."),
    ]
    addresses: tuple[str, ...]
    interface: Annotated[
        str | None, Meta(description="The local interface that the link to it uses.")
    ] = None
    jitter_ms: Annotated[
        float | None, Meta(description="The standard deviation of the round trip.")
    ] = None
    silence_s: Annotated[
        float | None,
        Meta(description="The longest silence that has ended by itself lately, weighted by age."),
    ] = None
    loss_percent: Annotated[
        float | None,
        Meta(description="Of the TCP segments that the link to it has sent, those sent again."),
    ] = None
    mbit_s: Annotated[
        int | None, Meta(description="The settled bandwidth from it to this machine.")
    ] = None
    cpu_percent: Annotated[
        int | None,
        Meta(description="How busy its processors are, all together; null while unknown."),
    ] = None
    memory_percent: Annotated[
        int | None, Meta(description="How much of its memory is in use; null while unknown.")
    ] = None
    paths: Annotated[tuple[PathStatus, ...], Meta(description="To it, the one in use first.")] = ()


class EdgeStatus(_Part, frozen=True, kw_only=True):
    """One edge of the ring, between neighbours."""

    sender: Annotated[str, Meta(description="The node id of a member.")]
    receiver: Annotated[str, Meta(description="Of the next one in the ring.")]
    rtt_ms: Annotated[
        float | None, Meta(description="As one of the two reports it; null while unknown.")
    ]
    mbit_s: Annotated[
        int | None, Meta(description="The settled bandwidth, the lower of what the two report.")
    ] = None


class ViewStatus(_Part, frozen=True, kw_only=True):
    """What all members agree on."""

    epoch: EpochStatus
    leader: str
    members: Annotated[tuple[MemberStatus, ...], Meta(description="In ring order.")]
    edges: Annotated[
        tuple[EdgeStatus, ...], Meta(description="Of the ring, in its order; none for one member.")
    ] = ()


class PeerStatus(_Part, frozen=True, kw_only=True):
    """Another agent that was seen, linked or not, of this mesh or not."""

    id: Annotated[str | None, Meta(description="null while a --peer has not been reached.")]
    name: str | None
    state: PeerState
    addresses: tuple[str, ...]
    reason: Annotated[
        str | None, Meta(description="Why there is no link, and what to do about it.")
    ] = None
    protocol: int | None = None


class HeldOffStatus(_Part, frozen=True, kw_only=True):
    """A linked agent that views have lost again and again, and that is not let back in yet."""

    id: str
    name: str
    losses: Annotated[int, Meta(description="That are not forgotten yet: one is after a minute.")]
    back_in_s: Annotated[float, Meta(description="After how long it may be a member again.")]


class RankStatus(_Part, frozen=True, kw_only=True):
    """One trainer of a job."""

    rank: Annotated[int, Meta(description="Its place in the job's ring; it changes as ranks go.")]
    trainer: Annotated[int, Meta(description="Its number within the job; never given twice.")]
    node: str
    name: Annotated[str, Meta(description="Of its machine.")]
    started: Annotated[
        int, Meta(description="The highest op that it started; -1 before the first.")
    ]
    completed: int
    step: Annotated[
        int,
        Meta(
            description="Its mesh.step, as far as it is known, or the steps of a batch sampler of "
            "torch; 0 before the first."
        ),
    ] = 0
    own_percent: Annotated[
        int | None,
        Meta(
            description="The share of the last seconds that its script spent outside collective "
            "calls: the rank with the highest is the one that others wait for."
        ),
    ] = None
    share_percent: Annotated[
        int | None,
        Meta(description="Its share of each batch, if the script takes rows by their shares."),
    ] = None
    reports: Annotated[
        dict[str, float | NotFinite],
        Meta(
            description="The numbers that its script has reported last, by name: its loss, and so "
            "on. Each is of this rank alone."
        ),
    ] = msgspec.field(default_factory=dict[str, "float | NotFinite"])
    stopped: Annotated[bool, Meta(description="Its process has been stopped, as by SIGSTOP.")] = (
        False
    )
    program: Annotated[
        str | None, Meta(description="What runs, for trainers on the machine that was asked.")
    ] = None
    compression: Annotated[
        str | None,
        Meta(
            description="How its values were compressed last, and why so, for trainers on the "
            "machine that was asked; null if they never were."
        ),
    ] = None


class NewcomerStatus(_Part, frozen=True, kw_only=True):
    """A trainer that waits for its job to begin, or to enter it at the next sync."""

    node: str
    name: Annotated[str, Meta(description="Of its machine.")]
    program: Annotated[
        str | None, Meta(description="What runs, for trainers on the machine that was asked.")
    ] = None


class TermsStatus(_Part, frozen=True, kw_only=True):
    """What the trainers of a job have asked for; the strictest holds for all."""

    min_ranks: Annotated[int, Meta(description="With fewer, ops wait.")]
    on_loss: Literal["continue", "raise"]
    quorum: Literal["any", "majority"]


class ComparisonStatus(_Part, frozen=True, kw_only=True):
    """What the ranks of a job have found last: whether all had the same state."""

    digest: Annotated[
        str, Meta(description="The hash of the state of most ranks: 32 hexadecimal digits.")
    ]
    step: Annotated[int, Meta(description="mesh.step then; 0 in a job that never syncs.")]
    op: Annotated[int, Meta(description="The op in which they compared.")]
    ranks: Annotated[int, Meta(description="How many took part.")]
    differing: Annotated[int, Meta(description="How many of them had another state.")]
    others: Annotated[
        tuple[int, ...], Meta(description="The trainers that had another one; at most three.")
    ]
    mended: Annotated[bool, Meta(description="They have the same state now: it was a sync.")]


class JobStatus(_Part, frozen=True, kw_only=True):
    """One named training run."""

    name: str
    state: JobState
    wait_for: Annotated[
        int | None, Meta(description="How many trainers it waits for; null once it runs.")
    ]
    ranks: tuple[RankStatus, ...]
    newcomers: tuple[NewcomerStatus, ...]
    roster: Annotated[
        int | None, Meta(description="Number of its roster; null while it waits.")
    ] = None
    step: Annotated[
        int, Meta(description="mesh.step of the foremost rank; 0 if the job never syncs.")
    ] = 0
    steps_per_s: Annotated[
        float | None, Meta(description="Over the last seconds; null while unknown.")
    ] = None
    ops_per_s: Annotated[
        float | None, Meta(description="Collective ops, over the last seconds; null as above.")
    ] = None
    stable: Annotated[
        int, Meta(description="The highest op that every rank is known to have completed.")
    ] = -1
    terms: Annotated[TermsStatus | None, Meta(description="null while it waits to begin.")] = None
    losses: Annotated[
        tuple[str, ...], Meta(description="Whom the last change of its ranks lost, and why.")
    ] = ()
    reason: Annotated[str | None, Meta(description="Why its ops wait.")] = None
    comparison: Annotated[
        ComparisonStatus | None,
        Meta(description="Whether all ranks have the same state; null if they never compared it."),
    ] = None


class TrafficStatus(_Part, frozen=True, kw_only=True):
    """Bytes at the sockets since the agent started, encryption included."""

    control_sent_bytes: int
    control_received_bytes: int
    data_sent_bytes: int
    data_received_bytes: int


class DoorStatus(_Part, frozen=True, kw_only=True):
    """Incoming connections since the agent started; `pending` is now."""

    accepted: int
    authenticated: int
    pending: int
    garbage: Annotated[int, Meta(description="Closed for their first bytes.")]
    closed_early: Annotated[
        int, Meta(description="Ended by the other side before it had said what it is.")
    ]
    timed_out: Annotated[
        int, Meta(description="Closed because they took longer than 5 s to authenticate.")
    ]
    dropped: Annotated[
        int,
        Meta(description="Closed, the oldest first, to keep the limits before authentication."),
    ]
    refused: Annotated[int, Meta(description="Closed because they could not authenticate.")]
    out_of_files: Annotated[
        int, Meta(description="Not accepted: no descriptor or memory was left.")
    ]


class TurnedAwayStatus(_Part, frozen=True, kw_only=True):
    """What was refused since the agent started."""

    connections: Annotated[int, Meta(description="Of strangers, to the agent's port.")]
    forged_announcements: Annotated[
        int, Meta(description="By mDNS with this mesh's tag, of somebody who lacks its key.")
    ]
    foreign_announcements: Annotated[
        int, Meta(description="By mDNS of other meshes, beyond those that are shown.")
    ]
    broken_links: Annotated[
        int, Meta(description="Ended because a member sent what no honest one would.")
    ]
    programs: Annotated[
        int, Meta(description="Local ones: another user's, or such that sent garbage or nothing.")
    ]


class OpDurationsStatus(_Part, frozen=True, kw_only=True):
    """How long the ops of one kind and size took that ranks of this machine have completed."""

    kind: Annotated[str, Meta(description="Such as all_reduce.")]
    up_to_bytes: Annotated[
        int | None,
        Meta(description="The largest op counted here; smaller sizes are counted by themselves."),
    ]
    counts: Annotated[
        tuple[int, ...],
        Meta(description="For each bound of `duration_bounds_s`, then for what took longer."),
    ]
    total_s: Annotated[float, Meta(description="All of them together, waiting included.")]


class Status(_Part, frozen=True, kw_only=True):
    """What `pmesh status --json` prints."""

    schema: Literal[2]
    version: Annotated[str, Meta(description="Of pmesh.")]
    protocol: int
    pid: int
    uptime_s: float
    node: NodeStatus
    view: ViewStatus
    peers: tuple[PeerStatus, ...]
    jobs: tuple[JobStatus, ...]
    traffic: TrafficStatus
    loop_lag_ms: Annotated[
        float, Meta(description="The longest that the event loop was held up in the last 10 s.")
    ]
    door: DoorStatus
    turned_away: TurnedAwayStatus
    held_off: tuple[HeldOffStatus, ...] = ()
    op_durations: Annotated[
        tuple[OpDurationsStatus, ...],
        Meta(description="Since the agent started, from a call's arrival at the agent to its end."),
    ] = ()
    duration_bounds_s: Annotated[
        tuple[float, ...], Meta(description="An op of just so many seconds is still within.")
    ] = ()


def name_peer(peer: PeerStatus, own_name: str) -> str:
    """Return what to call a machine that is not linked."""
    if peer.name == own_name and peer.id is not None:
        return shared_name(own_name, peer.id)
    return peer.name or ", ".join(peer.addresses)


def describe_other_mesh(peer: PeerStatus, *, own_name: str) -> str:
    """Say of a machine with another key, to who has just started this one, what to type here."""
    whom = name_peer(peer, own_name)
    return (
        f"{whom} is here, but holds another mesh key, so this machine is in a mesh of its own; to "
        f"join {whom}, type there: pmesh invite; and here: pmesh down, then pmesh join --replace "
        "--up with the code"
    )


def encode_status(status: Status) -> bytes:
    return msgspec.json.encode(status)


def decode_status(data: bytes) -> Status:
    """The inverse of `encode_status`. Raises UsageError if the schema differs."""
    return decode_as(Status, data, "the agent's status has", SCHEMA_VERSION)


def decode_as(kind: type[T], data: bytes, what: str, version: int) -> T:
    """Decode JSON of an agent, which may run another version of pmesh."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise UsageError(
            f"{what} a schema other than that of this pmesh ({version}): {e}; "
            "restart the agent: 'pmesh down', then 'pmesh up'"
        ) from e


def json_schema(kind: type[Struct]) -> bytes:
    """Return the JSON schema of `Status` or `EventPage` for docs/reference."""
    schema = {"$schema": _JSON_SCHEMA, **msgspec.json.schema(kind)}
    return msgspec.json.format(msgspec.json.encode(schema), indent=2) + b"\n"
