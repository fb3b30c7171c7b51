"""C and Python mean the same memory."""

import ctypes
import re
from enum import IntEnum
from pathlib import Path

import pytest

from pmesh import native
from pmesh.native import layout

HEADER = Path(native.__file__).parents[2] / "native" / "pmesh.h"


def test_the_structs_have_the_same_sizes_and_offsets() -> None:
    library = native.library()
    assert library is not None
    sizes = [
        ctypes.sizeof(layout.LaneState),
        layout.RECORD.itemsize,
        layout.NEED.itemsize,
        layout.COPY.itemsize,
        layout.WORK.itemsize,
        ctypes.sizeof(layout.Coding),
        layout.TRACK.itemsize,
        ctypes.sizeof(layout.PlanStruct),
        ctypes.sizeof(layout.OpStruct),
        layout.LaneState.seal_key.offset,
        layout.Coding.codec.offset,
        layout.OpStruct.seal.offset,
        layout.OpStruct.has_failed.offset,
        ctypes.sizeof(layout.LostSubflow),
        ctypes.sizeof(layout.Pace),
    ]
    assert library.pmesh_layout()[: len(sizes)] == sizes


def test_the_calls_that_a_trainer_repeats_have_the_same_layout_and_constants() -> None:
    library = native.library()
    assert library is not None
    numbers = [
        ctypes.sizeof(layout.MessageStruct),
        ctypes.sizeof(layout.CallStruct),
        ctypes.sizeof(layout.SlotStruct),
        ctypes.sizeof(layout.EndedOpStruct),
        ctypes.sizeof(layout.PersistentStruct),
        *(getattr(layout.PersistentStruct, name).offset for name in ("runner", "log", "unread")),
        layout.MOST_CALLS,
        layout.MOST_SLOTS,
        layout.OWN_SLOTS,
        layout.LOGGED_OPS,
        layout.MESSAGE_PARTS,
    ]
    assert library.pmesh_persistent_layout()[: len(numbers)] == numbers


@pytest.mark.parametrize(
    ("header", "name", "enum"),
    [
        ("pmesh.h", "state", layout.RunState),
        ("pmesh.h", "status", layout.RunStatus),
        ("persistent.h", "why", layout.WhyStopped),
    ],
)
def test_the_enums_have_the_same_names_in_the_same_order(
    header: str, name: str, enum: type[IntEnum]
) -> None:
    text = HEADER.with_name(header).read_text()
    found = re.search(rf"enum pmesh_{name} \{{(.*?)\}}", text, re.DOTALL)
    assert found is not None
    names = re.findall(r"PMESH_(\w+),", found[1])
    assert [member.name for member in enum] == names
    assert [member.value for member in enum] == list(range(len(names)))


def test_the_flags_of_subflows_have_the_same_values() -> None:
    found = re.findall(r"PMESH_SUBFLOWS_(\w+) = (\d+),", HEADER.with_name("subflows.h").read_text())
    ours = {flag.name: flag.value for flag in layout.SubflowsState}
    assert {name: int(value) for name, value in found} == ours


def test_the_codecs_have_the_same_order() -> None:
    names = re.findall(r"PMESH_CODEC_(\w+),", HEADER.read_text())
    assert [name.lower().replace("_", "-") for name in names] == list(layout.CODECS)
