"""The memory that the native library and Python share: the structs of native/pmesh.h."""

import ctypes
from enum import IntEnum, IntFlag
from typing import Final

import numpy as np

KEY_BYTES: Final = 16
REGIONS: Final = 3


class RunState(IntEnum):
    """`enum pmesh_state`: how far an op has come."""

    OVER = 0
    AWAITS = 1
    BUSY = 2
    RUNS = 3


class RunStatus(IntEnum):
    """`enum pmesh_status`: how an op has ended."""

    DONE = 0
    STOPPED = 1
    INVALID = 2
    NO_THREAD = 3
    DIFFERS = 4
    ENDED = 5
    FAILED = 6
    TOO_LARGE = 7
    OUT_OF_PLACE = 8
    FORGED = 9


class LaneState(ctypes.Structure):
    """`struct pmesh_lane`: one end of a lane, whichever executor uses it."""

    _fields_ = (
        ("bytes_sent", ctypes.c_uint64),
        ("bytes_received", ctypes.c_uint64),
        ("sealed", ctypes.c_uint64),
        ("opened", ctypes.c_uint64),
        ("out", ctypes.c_void_p),
        ("in_", ctypes.c_void_p),
        ("unsent_begin", ctypes.c_uint64),
        ("unsent_end", ctypes.c_uint64),
        ("filled", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
        ("peer_completed", ctypes.c_int64),
        ("paced_bytes", ctypes.c_uint64),
        ("paced_s", ctypes.c_double),
        ("subflows", ctypes.c_void_p),
        ("fd", ctypes.c_int32),
        ("wake_up_bytes", ctypes.c_int32),
        ("asked", ctypes.c_int32),
        ("seal_key", ctypes.c_uint8 * KEY_BYTES),
        ("open_key", ctypes.c_uint8 * KEY_BYTES),
    )
    bytes_sent: int
    bytes_received: int
    sealed: int
    opened: int
    out: int
    in_: int
    unsent_begin: int
    unsent_end: int
    filled: int
    dropped: int
    peer_completed: int
    paced_bytes: int
    paced_s: float
    subflows: int | None
    fd: int
    wake_up_bytes: int
    asked: int


class SubflowsState(IntFlag):
    """`enum pmesh_subflows_state`: of a lane over several connections."""

    HAVE_ROOM = 1
    HAVE_UNSENT = 2
    ARE_EMPTY = 4
    OWE = 8
    HAVE_FIRST = 16


class LostSubflow(ctypes.Structure):
    """`struct pmesh_lost_subflow`: a connection that was lost."""

    _fields_ = (("index", ctypes.c_uint32), ("ended", ctypes.c_bool))
    index: int
    ended: bool


class Pace(ctypes.Structure):
    """`struct pmesh_pace`: how fast data came on a connection."""

    _fields_ = (
        ("seconds", ctypes.c_double),
        ("nbytes", ctypes.c_uint64),
        ("index", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )
    seconds: float
    nbytes: int
    index: int


RECORD = np.dtype(
    [
        ("offset", np.uint64),
        ("nbytes", np.uint64),
        ("other", np.uint64),
        ("need_begin", np.uint32),
        ("need_end", np.uint32),
        ("region", np.uint8),
        ("then", np.uint8),
        ("finishes", np.uint8),
    ],
    align=True,
)
"""`struct pmesh_record`."""
NEED = np.dtype([("track", np.uint32), ("number", np.uint32)])
"""`struct pmesh_need`."""
COPY = np.dtype([("source", np.uint64), ("result", np.uint64), ("nbytes", np.uint64)])
"""`struct pmesh_copy`."""
WORK = np.dtype(
    [
        ("begin", np.uint64),
        ("count", np.uint64),
        ("offset", np.uint64),
        ("nbytes", np.uint64),
        ("arrived", np.uint64),
        ("need_begin", np.uint32),
        ("need_end", np.uint32),
        ("region", np.uint8),
        ("decodes", np.uint8),
        ("divides", np.uint8),
    ],
    align=True,
)
"""`struct pmesh_work`."""
FIRST_HOP: Final = 2**64 - 1
"""`PMESH_FIRST_HOP`."""
CODECS: Final = ("fp16", "bf16", "int8", "int8-stochastic")
"""Their names in `pmesh.compression.codecs`, in the order of `enum pmesh_codec`."""
TRACK = np.dtype([("begin", np.uint32), ("end", np.uint32)])
"""`struct pmesh_track`."""


class PlanStruct(ctypes.Structure):
    """`struct pmesh_plan`: a plan laid out flat."""

    _fields_ = (
        ("records", ctypes.c_void_p),
        ("needs", ctypes.c_void_p),
        ("copies", ctypes.c_void_p),
        ("works", ctypes.c_void_p),
        ("tracks", ctypes.c_void_p),
        ("record_count", ctypes.c_uint32),
        ("need_count", ctypes.c_uint32),
        ("copy_count", ctypes.c_uint32),
        ("work_count", ctypes.c_uint32),
        ("receiving", ctypes.c_uint32),
        ("sending", ctypes.c_uint32),
        ("computing", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("added_twice", ctypes.c_uint8),
        ("two_threads", ctypes.c_uint8),
        ("computes_much", ctypes.c_uint8),
        ("unused", ctypes.c_uint8 * 5),
    )


class TermsStruct(ctypes.Structure):
    """`struct pmesh_terms`: the factors of a hop."""

    _fields_ = (
        ("own_scale", ctypes.c_float),
        ("divisor", ctypes.c_float),
        ("residual_factor", ctypes.c_float),
    )
    own_scale: float
    divisor: float
    residual_factor: float


class Coding(ctypes.Structure):
    """`struct pmesh_coding`: how one run of a plan encodes."""

    _fields_ = (
        ("residual", ctypes.c_void_p),
        ("residual_out", ctypes.c_void_p),
        ("bounce", ctypes.c_void_p),
        ("bounce_bytes", ctypes.c_uint64),
        ("draw", ctypes.c_uint64),
        ("block", ctypes.c_uint64),
        ("clipped", ctypes.c_int64),
        ("terms", TermsStruct * 2),
        ("codec", ctypes.c_int32),
    )
    clipped: int
    terms: ctypes.Array[TermsStruct]


class OpStruct(ctypes.Structure):
    """`struct pmesh_op`: one run of a plan."""

    _fields_ = (
        ("plan", ctypes.c_void_p),
        ("lanes", ctypes.c_void_p),
        ("regions", ctypes.c_void_p * REGIONS),
        ("region_bytes", ctypes.c_uint64 * REGIONS),
        ("coding", ctypes.c_void_p),
        ("fold", ctypes.c_void_p),
        ("seal", ctypes.c_void_p),
        ("open", ctypes.c_void_p),
        ("roster", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("fingerprint", ctypes.c_uint64),
        ("completed", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("reduction", ctypes.c_int32),
        ("aead", ctypes.c_int32),
        ("failure", ctypes.c_int32),
        ("track", ctypes.c_uint32),
        ("detail", ctypes.c_uint64),
        ("has_failed", ctypes.c_bool),
    )
    plan: int
    lanes: int
    coding: int | None
    fold: int | None
    roster: int
    number: int
    fingerprint: int
    completed: int
    dtype: int
    reduction: int
    track: int
    detail: int


MOST_CALLS: Final = 32
MOST_SLOTS: Final = 5
OWN_SLOTS: Final = 3
LOGGED_OPS: Final = 1024
MESSAGE_PARTS: Final = 4
UNREAD_BYTES: Final = 4096


class WhyStopped(IntEnum):
    """`enum pmesh_why`: why a thread serves a trainer no longer."""

    RECALLED = 0
    OTHER = 1
    BEGUN = 2
    UNANSWERED = 3


class MessageStruct(ctypes.Structure):
    """`struct pmesh_message`: a message around its numbers."""

    _fields_ = (
        ("parts", ctypes.c_char_p * MESSAGE_PARTS),
        ("nbytes", ctypes.c_uint32 * MESSAGE_PARTS),
        ("count", ctypes.c_uint32),
    )


class CallStruct(ctypes.Structure):
    """`struct pmesh_call`: a call that may be repeated."""

    _fields_ = (
        ("op", ctypes.c_void_p),
        ("meeting", ctypes.c_void_p),
        ("folded", ctypes.c_void_p),
        ("request", MessageStruct),
        ("reply", MessageStruct),
        ("lending", MessageStruct),
        ("source", ctypes.c_void_p),
        ("arena", ctypes.c_void_p),
        ("arena_bytes", ctypes.c_uint64),
        ("itemsize", ctypes.c_uint64),
        ("says_place", ctypes.c_uint32),
        ("says_step", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
    )


class SlotStruct(ctypes.Structure):
    """`struct pmesh_slot`: an arena for results."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("nbytes", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("free_at", ctypes.c_uint64),
        ("lent", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
    )
    memory: int
    nbytes: int
    number: int
    free_at: int
    lent: int
    shared: int


class EndedOpStruct(ctypes.Structure):
    """`struct pmesh_ended_op`: an op that has ended well."""

    _fields_ = (
        ("began_s", ctypes.c_double),
        ("ended_s", ctypes.c_double),
        ("receiving_s", ctypes.c_double),
        ("number", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("call", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
    )
    began_s: float
    ended_s: float
    receiving_s: float
    number: int
    step: int
    call: int
    slot: int


class PersistentStruct(ctypes.Structure):
    """`struct pmesh_persistent`: the calls that one trainer repeats."""

    _fields_ = (
        ("calls", CallStruct * MOST_CALLS),
        ("slots", SlotStruct * (2 * MOST_SLOTS)),
        ("drop", MessageStruct),
        ("runner", ctypes.c_void_p),
        ("next", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        ("most_wait_s", ctypes.c_double),
        ("trusted_until_us", ctypes.c_uint64),
        ("ended", ctypes.c_uint64),
        ("noted", ctypes.c_uint64),
        ("log", EndedOpStruct * LOGGED_OPS),
        ("call_count", ctypes.c_uint32),
        ("slot_count", ctypes.c_uint32),
        ("may_lend", ctypes.c_uint32),
        ("session", ctypes.c_int32),
        ("why", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("call", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
        ("step", ctypes.c_uint64),
        ("unread_bytes", ctypes.c_uint32),
        ("unread", ctypes.c_uint8 * UNREAD_BYTES),
    )
    calls: ctypes.Array[CallStruct]
    slots: ctypes.Array[SlotStruct]
    drop: MessageStruct
    next: int
    limit: int
    trusted_until_us: int
    call_count: int
    slot_count: int
    may_lend: int
    why: int
    state: int
    call: int
    slot: int
    unread_bytes: int
    unread: ctypes.Array[ctypes.c_uint8]


def address_of(region: memoryview) -> int:
    """Return where a region lies; where nothing is read or written if it is empty."""
    if not len(region):
        region = _NOWHERE
    if region.readonly:
        address: int = np.frombuffer(region, np.uint8).ctypes.data
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(region))  # a quarter of the time


_NOWHERE: Final = np.zeros(1, np.uint64).view(np.uint8).data
