"""Each error has one row on the page, and a docstring of the same words that leads there."""

import inspect
import re

import pytest

from pmesh import errors
from tests.docs.pages import DOCS, code_in, read, sections, table_rows

PAGE = DOCS / "how-to" / "troubleshooting.md"
FAMILIES = sections(sections(read(PAGE))["Errors by name"], level=3)
ROWS = [(family, row) for family, body in FAMILIES.items() for row in table_rows(body)]
ERRORS = {
    name: error
    for name, error in vars(errors).items()
    if inspect.isclass(error) and issubclass(error, errors.PmeshError)
}


def anchor_of(heading: str) -> str:
    """As GitHub and myst make it."""
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def without_links(cell: str) -> str:
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", cell)


def test_every_error_stands_once_under_the_one_at_fault() -> None:
    placed = {code_in(row[0])[0]: family.rpartition(": ")[2] for family, row in ROWS}

    assert len(placed) == len(ROWS)
    assert set(placed) == set(ERRORS)
    for name, family in placed.items():
        assert issubclass(ERRORS[name], ERRORS.get(family, errors.PmeshError)), name
        if family not in ERRORS:
            assert name in {"PmeshError", "ProtocolError"}


@pytest.mark.parametrize(("family", "row"), ROWS, ids=[code_in(row[0])[0] for _, row in ROWS])
def test_the_docstring_has_the_words_of_the_row_and_leads_there(
    family: str, row: list[str]
) -> None:
    error, cause, cure = row
    link = f"See {PAGE.relative_to(DOCS.parent)}#{anchor_of(family)}."

    assert " ".join((ERRORS[code_in(error)[0]].__doc__ or "").split()) == (
        f"{cause} {without_links(cure)} {link}"
    )
