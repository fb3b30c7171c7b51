"""C and Python mean the same memory."""

import ctypes
import re
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


@pytest.mark.parametrize("name", ["state", "status"])
def test_the_enums_have_the_same_names_in_the_same_order(name: str) -> None:
    found = re.search(rf"enum pmesh_{name} \{{(.*?)\}}", HEADER.read_text(), re.DOTALL)
    assert found is not None
    names = re.findall(r"PMESH_(\w+),", found[1])
    enum = getattr(layout, f"Run{name.capitalize()}")
    assert [member.name for member in enum] == names
    assert [member.value for member in enum] == list(range(len(names)))


def test_the_flags_of_subflows_have_the_same_values() -> None:
    found = re.findall(r"PMESH_SUBFLOWS_(\w+) = (\d+),", HEADER.with_name("subflows.h").read_text())
    ours = {flag.name: flag.value for flag in layout.SubflowsState}
    assert {name: int(value) for name, value in found} == ours


def test_the_codecs_have_the_same_order() -> None:
    names = re.findall(r"PMESH_CODEC_(\w+),", HEADER.read_text())
    assert [name.lower().replace("_", "-") for name in names] == list(layout.CODECS)
