"""What a trace's file says, for what may come from any machine."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given

from pmesh.ids import JobName
from pmesh.traces.rules.perfetto import MESH, entries_of
from pmesh.traces.rules.timeline import find_waits, place_ops
from pmesh.traces.wire import TracedEvent, TracedMachine, TracedOps
from tests.traces.histories import (
    BEGAN_US,
    JOB,
    TraceHistory,
    histories,
    machine,
    message,
    op,
    told,
)

END_US = BEGAN_US + 60 * 10**6


def entries(
    traced: Sequence[TracedOps],
    machines: Sequence[TracedMachine],
    changes: Sequence[TracedEvent] = (),
    *,
    until_us: int = END_US,
) -> list[dict[str, Any]]:
    placed = place_ops(traced, machines, since_us=BEGAN_US, until_us=until_us)
    found = entries_of(placed, find_waits(placed), machines, changes, job=JOB, since_us=BEGAN_US)
    read: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(list(found)))
    return read


def slices(found: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    return [(each["name"], each["ts"], each["dur"]) for each in found if each["ph"] == "X"]


def names(found: list[dict[str, Any]], what: str) -> dict[int, str]:
    return {each["pid"]: each["args"]["name"] for each in found if each["name"] == what}


@given(histories())
def test_no_slice_ends_before_it_begins_and_those_of_a_row_lie_within_each_other(
    history: TraceHistory,
) -> None:
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for each in entries(history.traced, history.machines, until_us=history.until_us):
        if each["ph"] == "X":
            begin, end = round(1e3 * each["ts"]), round(1e3 * (each["ts"] + each["dur"]))
            assert 0 <= begin < end
            rows[each["pid"], each["tid"]].append((begin, end))
    for spans in rows.values():
        open_: list[int] = []
        for begin, end in spans:  # in the order of the file: what is around comes first
            while open_ and open_[-1] <= begin:
                open_.pop()
            assert not open_ or end <= open_[-1]
            open_.append(end)


def test_a_rank_has_its_calls_what_they_waited_for_and_the_time_between() -> None:
    quick = told(0, (op(0, BEGAN_US, BEGAN_US + 90), op(1, BEGAN_US + 100, BEGAN_US + 200)))
    slow = told(1, (op(0, BEGAN_US + 60, BEGAN_US + 90),))

    found = entries((quick, slow), (machine(0, me=True), machine(1)))

    assert names(found, "process_name") == {
        MESH: "the mesh",
        2: "rank 0 on mac-0",
        3: "rank 1 on mac-1",
    }
    assert names(found, "thread_name")[2] == "calls of digits"
    assert slices([each for each in found if each["pid"] == 2]) == [
        ("all_reduce", 0, 90),
        ("waits for rank 1 on mac-1", 0, 60),
        ("moves values", 60, 30),
        ("outside calls", 90, 10),
        ("all_reduce", 100, 100),
        ("moves values", 100, 100),
    ]
    (first, *_) = (each for each in found if each["name"] == "all_reduce")
    assert first["args"] == {"op": 0, "size": "4.0 KiB", "bytes": 4096, "clock_error_us": 0.0}


def test_a_call_that_failed_says_so_and_one_without_values_moves_none() -> None:
    failed = msgspec.structs.replace(op(0, BEGAN_US, BEGAN_US + 9, "barrier"), completed=False)
    failed = msgspec.structs.replace(failed, nbytes=0)

    found = entries((told(0, (failed,)),), (machine(0, me=True),))

    ((name, *_),) = slices(found)
    assert name == "barrier"
    assert [each["args"]["failed"] for each in found if each["name"] == "barrier"] == [True]


def test_the_calls_of_a_group_are_a_row_of_the_same_process() -> None:
    group = JobName("digits/abc.0")
    own, within = (op(0, BEGAN_US, BEGAN_US + 9),), (op(0, BEGAN_US + 1, BEGAN_US + 4),)
    alone = told(1, within, job=group)

    found = entries(
        (told(0, own), told(0, within, job=group), alone), (machine(0, me=True), machine(1))
    )

    rows = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in found
        if each["name"] == "thread_name"
    }
    assert rows == {
        (MESH, 1): "views and losses",
        (2, 1): "calls of digits/abc.0",
        (3, 1): "calls of digits/abc.0",
        (3, 2): "calls of digits",
    }
    assert names(found, "process_name")[2] == "a rank on mac-1"
    assert names(found, "process_name")[3] == "rank 0 on mac-0"


def test_messages_that_overlap_have_rows_of_their_own_and_an_arrow_to_the_receiver() -> None:
    sends = (
        message("send", BEGAN_US + 5, BEGAN_US + 40, peer=1),
        message("send", BEGAN_US + 10, BEGAN_US + 50, peer=1, number=1, tag=-1),
        message("send", BEGAN_US + 45, BEGAN_US + 60, peer=7),
    )
    got = (message("recv", BEGAN_US + 5, BEGAN_US + 40, peer=0),)
    call = op(0, BEGAN_US + 70, BEGAN_US + 90, "barrier")

    found = entries((told(0, (*sends, call)), told(1, got)), (machine(0, me=True), machine(1)))

    rows = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in found
        if each["name"] == "thread_name"
    }
    shown = {
        (each["name"], rows[each["pid"], each["tid"]])
        for each in found
        if each["ph"] == "X" and each["name"] != "moves values"
    }
    assert shown == {
        ("barrier", "calls of digits"),
        ("send to rank 1", "messages"),
        ("rpc to rank 1", "messages, row 2"),
        ("send to another rank", "messages"),
        ("recv from rank 0", "messages"),
    }
    assert list(rows.values())[1:4] == ["calls of digits", "messages", "messages, row 2"]
    arrow = [(each["ph"], each["pid"], each["ts"]) for each in found if each["ph"] in "sf"]
    assert arrow == [("s", 2, 5), ("f", 3, 39.999)]
    (first, *_) = (each for each in found if each["name"] == "send to rank 1")
    assert first["args"] == {
        "message": 0,
        "tag": 3,
        "size": "4.0 KiB",
        "bytes": 4096,
        "clock_error_us": 0.0,
    }


def test_calls_that_the_drift_of_clocks_makes_overlap_are_cut() -> None:
    times = (op(0, BEGAN_US, BEGAN_US + 100), op(1, BEGAN_US + 99, BEGAN_US + 150))

    found = entries((told(0, times),), (machine(0, me=True),))

    assert [each[1:] for each in slices(found) if each[0] == "all_reduce"] == [(0, 100), (100, 50)]


def test_changes_are_marks_or_slices_of_a_row_of_their_own() -> None:
    changes = (
        TracedEvent(BEGAN_US + 50, 0, "rank lost", "job 'digits': rank 2 is lost"),
        TracedEvent(BEGAN_US + 90, 30, "ring stood still", "it stood still"),
        TracedEvent(BEGAN_US + 95, 10**9, "agent stalled", "longer than the trace"),
    )

    found = entries((told(0, (op(0, BEGAN_US, BEGAN_US + 9),)),), (machine(0, me=True),), changes)

    marks = [each for each in found if each["pid"] == MESH and each["ph"] != "M"]
    assert [(each["ph"], each["ts"], each.get("dur")) for each in marks] == [
        ("i", 50, None),
        ("X", 60, 30),
        ("X", 0, 95),
    ]
    assert marks[0]["args"]["text"] == "job 'digits': rank 2 is lost"
