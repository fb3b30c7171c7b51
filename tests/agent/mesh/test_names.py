"""Whose a name is: the node's that was seen first under it."""

import stat
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from pmesh.agent.events import News
from pmesh.agent.mesh import names
from pmesh.agent.mesh.names import (
    MAX_NAMES,
    MAX_NAMES_OF_NODE,
    NAMES_NAME,
    MachineNames,
    load_names,
    store_names,
)
from pmesh.core.values import Seat, View
from pmesh.errors import ConfigError, UsageError
from pmesh.ids import Epoch, Incarnation, Member, NodeId, node_text, short_node
from tests.worlds.builders import unsigned
from tests.worlds.trainer import until

ONE, TWO, THREE = (NodeId(bytes([17 * n]) * 32) for n in (1, 2, 3))


def a_view(**names: str) -> View:
    """Of the machines one, two and three, which say these names."""
    nodes = {"one": ONE, "two": TWO, "three": THREE}
    return view_of({nodes[which]: name for which, name in names.items()})


def view_of(said: dict[NodeId, str]) -> View:
    members = [Member(node, Incarnation(1)) for node in said]
    epoch = Epoch(1, *members[0])
    seats = zip(members, said.values(), strict=True)
    return View(epoch, tuple(Seat(m, unsigned(name), epoch, None) for m, name in seats))


def longer(name: str, node: NodeId) -> str:
    return f"{name} ({node_text(node)[:4]})"


@dataclass
class Book:
    """What one agent remembers, and what it has said about that."""

    owners: dict[str, NodeId] = field(default_factory=dict[str, NodeId])
    news: list[News] = field(default_factory=list[News])

    def __post_init__(self) -> None:
        self.names = MachineNames(self.owners, noticed=self.news.append)

    def see(self, **names: str) -> list[str]:
        """A view is installed; return what its machines are called."""
        view = a_view(**names)
        self.names.follow(view)
        return [self.names.of_seat(seat) for seat in view.seats]


def test_a_name_that_was_seen_once_is_not_given_to_another_machine() -> None:
    book = Book()
    assert book.see(one="mac", two="studio") == ["mac", "studio"]
    assert book.see(two="studio") == ["studio"]
    assert book.see(two="studio", three="mac") == ["studio", longer("mac", THREE)]
    with pytest.raises(UsageError) as refused:
        book.names.find_here("mac")
    assert str(refused.value) == (
        f"the machine that calls itself 'mac' now, {short_node(THREE)}, is not the one that had "
        f"this name before, {short_node(ONE)}; if you have reinstalled that machine, type: pmesh "
        "forget mac"
    )
    assert book.names.find_here(longer("mac", THREE)) == THREE
    assert book.names.find("mac") == ONE
    assert book.see(one="mac", two="studio") == ["mac", "studio"]


def test_it_is_said_once_which_machine_wants_the_name_of_another() -> None:
    book = Book()
    book.see(one="mac")
    for _ in range(3):
        book.see(two="mac")
    (news,) = book.news
    assert (news.kind, news.names) == ("name refused", (longer("mac", TWO),))
    assert f"{short_node(TWO)} says" in news.text
    assert f"mac is the name of {short_node(ONE)}" in news.text
    assert "if you have reinstalled that machine, type: pmesh forget mac" in news.text


def test_two_machines_of_one_name_that_are_both_here_are_no_reinstalled_one() -> None:
    book = Book()
    book.see(one="mac")
    assert book.see(one="mac", two="mac") == [longer("mac", ONE), longer("mac", TWO)]
    (news,) = book.news
    assert news.text.endswith("start one with 'pmesh up --name OTHER'")
    assert book.names.find_here("mac") == ONE


def test_two_machines_of_one_name_that_come_together_are_no_news() -> None:
    book = Book()
    assert book.see(one="mac", two="mac") == [longer("mac", ONE), longer("mac", TWO)]
    assert not book.news
    with pytest.raises(UsageError, match="no machine is called 'mac'; there are mac"):
        book.names.find("mac")


def test_a_name_that_was_forgotten_belongs_to_who_says_it() -> None:
    book = Book()
    book.see(one="mac")
    book.see(two="mac")
    assert book.names.forget("mac") == ONE
    assert book.names.find_here("mac") == TWO
    with pytest.raises(UsageError, match="no machine was ever called 'mini'; known names are"):
        book.names.forget("mini")


def test_a_machine_is_found_by_the_start_of_its_id_from_eight_characters_on() -> None:
    book = Book()
    book.see(one="mac", two="studio")
    for text in (node_text(ONE), short_node(ONE)):
        assert book.names.find_here(text) == ONE
    with pytest.raises(UsageError, match="no machine is called"):
        book.names.find(node_text(ONE)[:7])
    book.see(two="studio")
    with pytest.raises(UsageError, match="is not here now; there are studio"):
        book.names.find_here(short_node(ONE))


def test_a_name_like_the_start_of_anothers_id_may_be_either() -> None:
    book = Book()
    book.see(one="mac", two=short_node(ONE))
    with pytest.raises(UsageError, match="may be one of several machines; type one of these"):
        book.names.find(short_node(ONE))


def test_a_name_with_a_comma_is_one_machine() -> None:
    book = Book()
    book.see(one="Studio, left", two="Studio", three="left")
    assert book.names.find_each_here(("Studio", "left")) == {ONE}
    assert book.names.find_each_here(("left", "Studio, left")) == {ONE, THREE}


def test_a_machine_outside_of_the_view_gets_no_name_of_another() -> None:
    book = Book()
    book.see(one="mac")
    assert book.names.of(TWO, "mac") == longer("mac", TWO)
    assert book.names.of(TWO, "mini") == "mini"


def test_a_machine_has_a_few_names_and_loses_its_own_oldest() -> None:
    book = Book()
    book.see(two="studio")
    for number in range(MAX_NAMES_OF_NODE + 1):
        book.see(one=f"host-{number}")
    assert sorted(book.owners) == sorted(
        ["studio", *(f"host-{number}" for number in range(1, MAX_NAMES_OF_NODE + 1))]
    )


def test_names_of_invented_machines_displace_none_and_are_said_to_be_too_many() -> None:
    book = Book()
    book.see(one="mac")
    for number in range(2 * MAX_NAMES):
        node = NodeId(number.to_bytes(32, "big"))
        book.names.follow(view_of({node: f"invented-{number}"}))
    assert len(book.owners) == MAX_NAMES
    assert book.owners["mac"] == ONE
    (news,) = book.news
    assert "256 names of machines are known" in news.text
    assert book.see(two="mac") == [longer("mac", TWO)]
    with pytest.raises(UsageError, match="no machine is called"):
        book.names.find(longer("mac", TWO))


def test_names_come_back_from_their_file(tmp_path: Path) -> None:
    assert load_names(tmp_path) == {}
    owners = {"\N{SNOWMAN}" * 60 + f"{number}": ONE for number in range(MAX_NAMES)}
    store_names(tmp_path, owners)
    assert load_names(tmp_path) == owners
    assert stat.S_IMODE((tmp_path / NAMES_NAME).stat().st_mode) == 0o600


async def test_names_that_could_not_be_written_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "AGAIN_S", 0.01)
    book, home = Book(), tmp_path / "home"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(book.names.keep, home)
        with capture_logs() as logs:
            book.see(one="mac")
            await until(lambda: bool(logs))
        home.mkdir()  # until now there was no room for it
        await until((home / NAMES_NAME).exists)
        assert load_names(home) == {"mac": ONE}
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"names": {"mac": "x"}}', b'{"names": 1}'])
def test_a_file_that_is_not_ours_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / NAMES_NAME
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"names is not what the agent writes: mv .*names"):
        load_names(tmp_path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read"):
        load_names(tmp_path)
