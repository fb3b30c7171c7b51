"""How a mesh looks in a notebook: what other machines call themselves is no HTML."""

from xml.etree import ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from pmesh.client.shown import MOST_NAMES, names_line, ranks_table


def test_our_own_rank_is_bold() -> None:
    assert ranks_table("Mesh 'digits'", ["mac-1", "mac-2"], 1) == (
        "<table><caption>Mesh &#x27;digits&#x27;</caption><tr><th>rank</th><th>machine</th></tr>"
        "<tr><td>0</td><td>mac-1</td></tr><tr><td><b>1</b></td><td><b>mac-2</b></td></tr></table>"
    )


@given(st.text(), st.lists(st.text(), max_size=4))
def test_no_name_becomes_a_tag(title: str, names: list[str]) -> None:
    names.append("<script>alert(1)</script>")
    table = ET.fromstring(ranks_table(title, names, 0))  # noqa: S314 - our own

    assert {each.tag for each in table.iter()} <= {"table", "caption", "tr", "th", "td", "b"}
    cells = ["".join(row[1].itertext()) for row in table.findall("tr")[1:]]
    assert len(cells) == len(names)
    assert cells[-1] == names[-1]


def test_a_line_names_the_first_machines_and_controls_no_terminal() -> None:
    assert names_line(["a\x1b[2J", "b"]) == "a\N{REPLACEMENT CHARACTER}[2J, b"
    assert names_line(["m"] * MOST_NAMES) == ", ".join("m" * MOST_NAMES)
    assert names_line(["m"] * (MOST_NAMES + 2)).endswith("m, 2 more")
