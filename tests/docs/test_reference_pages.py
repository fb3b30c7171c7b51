import inspect
from typing import get_args

import msgspec
import pytest

import pmesh
from pmesh import errors
from pmesh.agent import schema
from pmesh.client.group import Collectives
from pmesh.client.trees.arrays import WIRE_OF
from pmesh.p2p.client.calls import PointToPoint
from tests.docs.pages import DOCS, code_in, read, sections, table_rows

STATUS = read(DOCS / "reference" / "status.md")
CLIENT = read(DOCS / "reference" / "client.md")

STRUCTS = {
    name: struct
    for name, struct in vars(schema).items()
    if inspect.isclass(struct)
    and issubclass(struct, msgspec.Struct)
    and struct.__module__ == schema.__name__
    and not name.startswith("_")
}


def first_cells(text: str) -> list[str]:
    return [code_in(row[0])[0] for row in table_rows(text)]


def test_the_status_page_explains_every_struct_and_no_other() -> None:
    assert set(sections(STATUS)) == set(STRUCTS)


@pytest.mark.parametrize("name", STRUCTS)
def test_the_status_page_explains_every_field_and_no_other(name: str) -> None:
    section = sections(STATUS)[name]
    fields = section.partition("| `state` | meaning |")[0]

    assert sorted(first_cells(fields)) == sorted(STRUCTS[name].__struct_fields__)


@pytest.mark.parametrize(
    ("section", "known"), [("PeerStatus", schema.PeerState), ("JobStatus", schema.JobState)]
)
def test_the_status_page_explains_every_state(section: str, known: object) -> None:
    states = sections(STATUS)[section].partition("| `state` | meaning |")[2]

    assert set(first_cells(f"| `state` | meaning |{states}")) == set(get_args(known))


def test_the_status_page_names_every_health_and_the_version() -> None:
    members = sections(STATUS)["MemberStatus"]

    assert all(f"`{health}`" in members for health in get_args(schema.MemberHealth))
    assert f"now {schema.SCHEMA_VERSION}." in STATUS


def test_every_dtype_that_travels_stands_on_the_page_with_what_it_travels_as() -> None:
    rows = {
        dtype: row[1]
        for row in table_rows(sections(CLIENT)["Arrays"])
        if not code_in(row[0])
        for dtype in row[0].split(", ")
    }

    assert rows.keys() - {"numpy", "MLX", "torch"} == set(WIRE_OF)
    for dtype, wire in WIRE_OF.items():
        assert rows[dtype].startswith((wire, "itself")), dtype


def test_every_public_name_that_is_no_error_is_on_the_page() -> None:
    for name in set(pmesh.__all__).difference(vars(errors)):
        assert f"pmesh.{name}" in CLIENT or f"`{name}`" in CLIENT, name


def test_every_call_stands_in_the_table_with_whether_it_can_wait_for_later() -> None:
    rows = list(table_rows(sections(CLIENT)["The calls"]))
    later = {
        name.partition("(")[0]: row[2].startswith(("yes", "all")) and f"`{name}`" not in row[2]
        for row in rows
        for name in code_in(row[0])
    }

    assert later == {
        name: "async_op" in inspect.signature(member).parameters
        for kind in (Collectives, PointToPoint)
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name != "close"
    }


def test_the_page_of_calls_is_what_their_docstrings_say() -> None:
    pytest.importorskip("mlx.core")
    from tools.python_reference import PAGE, write_page  # noqa: PLC0415 - it imports MLX

    assert read(PAGE) == write_page(), "type: python tools/python_reference.py"
