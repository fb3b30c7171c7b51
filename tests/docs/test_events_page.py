from typing import get_args

import pytest

from pmesh.agent.events import (
    EVENTS_SCHEMA_VERSION,
    KEPT,
    MAX_TEXT,
    Event,
    EventKind,
    EventPage,
    News,
)
from tests.docs.pages import DOCS, code_in, read, sections, table_rows

PAGE = read(DOCS / "reference" / "events.md")
FIELDS, _, KINDS = sections(PAGE)["Event"].partition("| kind |")


@pytest.mark.parametrize(
    ("text", "struct"), [(sections(PAGE)["EventPage"], EventPage), (FIELDS, Event)]
)
def test_the_page_explains_every_field_and_no_other(
    text: str, struct: type[EventPage | Event]
) -> None:
    fields = [code_in(row[0])[0] for row in table_rows(text)]

    assert sorted(fields) == sorted(struct.__struct_fields__)


def test_the_page_explains_every_kind_and_which_are_printed() -> None:
    rows = {code_in(row[0])[0]: row[1] for row in table_rows(f"| kind |{KINDS}")}

    assert list(rows) == list(get_args(EventKind))
    for kind in get_args(EventKind):
        assert (rows[kind] == "•") == News(kind=kind, text="").is_announced, kind


def test_the_page_states_the_version_and_the_limits() -> None:
    assert f"now {EVENTS_SCHEMA_VERSION}." in PAGE
    assert f"the last {KEPT:,}." in PAGE
    assert f"at most {MAX_TEXT} characters" in PAGE
    assert f"the last {KEPT:,} events" in read(DOCS / "reference" / "command-line.md")
