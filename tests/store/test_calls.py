"""`mesh.store`, as a script calls it."""

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, cast

import numpy as np
import pytest

import pmesh
from pmesh.testing import SimulatedMesh

MIB = 1024 * 1024


class Number(IntEnum):
    TWO = 2


def test_every_call_does_what_its_name_says() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        store = mesh.store
        assert store is mesh.store
        store.set("bytes", b"12")
        assert store.get("bytes") == b"12"
        assert store.add("bytes", -2) == 10
        assert store.add("new") == 1
        assert [store.add("kinds", n) for n in (np.int64(5), Number.TWO, True)] == [5, 7, 8]
        assert store.compare_set("new", b"2", b"3") == b"1"
        assert store.compare_set("new", b"1", b"3") == b"3"
        assert store.compare_set("absent", b"2", b"3") is None
        assert store.compare_set("absent", b"", b"3") == b"3"
        store.append("list", b"a")
        store.append("list", b"b")
        assert store.get("list") == b"ab"
        store.wait(["bytes", "list"])
        assert store.check(["bytes", "list"])
        assert not store.check(["bytes", "nothing"])
        assert store.keys() == ["absent", "bytes", "kinds", "list", "new"]
        assert store.keys("b") == ["bytes"]
        assert store.delete("list")
        assert not store.delete("list")
        store.set("ключ", bytes(range(256)) * 4096)
        assert store.get("ключ") == bytes(range(256)) * 4096

    SimulatedMesh(1).run(train)


def test_ranks_and_threads_share_it_and_wait_for_each_other() -> None:
    def train(mesh: pmesh.Mesh) -> list[int]:
        tickets = list[int]()
        waiting = [
            threading.Thread(target=lambda: tickets.append(int(mesh.store.get("go"))))
            for _ in range(4)
        ]
        for thread in waiting:
            thread.start()
        tickets.append(mesh.store.add("there"))
        if mesh.rank == 2:
            mesh.store.set("go", b"7")
        for thread in waiting:
            thread.join()
        return sorted(tickets)

    results = SimulatedMesh(3).run(train)
    assert sorted(results) == [[1, 7, 7, 7, 7], [2, 7, 7, 7, 7], [3, 7, 7, 7, 7]]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: s.set("k" * 1025, b""), "a key has at most 1024 bytes in UTF-8, not 1025"),
        (lambda s: s.set("\u00e4" * 513, b""), "a key has at most 1024 bytes in UTF-8, not 1026"),
        (lambda s: s.set("\ud800", b""), "a key is text in Unicode"),
        (lambda s: s.set(3, b""), "a key is text in Unicode, not 3"),
        (lambda s: s.set("k", "text"), "a value is bytes, not str: encode it"),
        (lambda s: s.set("k", bytes(MIB + 1)), "a value has at most 1048576 bytes, not 1048577"),
        (lambda s: s.add("k", 2**63), "an amount is an integer of 64 bits"),
        (lambda s: s.add("k", 1.5), "an amount is an integer of 64 bits, not 1.5"),
        (lambda s: s.add("k", "1"), "an amount is an integer of 64 bits, not '1'"),
        (lambda s: s.add("text"), "key 'text' holds no number that add could add to"),
        (lambda s: s.append("text", bytes(MIB)), "key 'text' would hold 1048580 bytes"),
        (lambda s: s.wait("text"), "keys is a list of keys, not the text 'text'"),
        (lambda s: s.wait(5), "keys is a list of keys, not 5"),
        (lambda s: s.check(["k"] * 1025), "at most 1024 keys at a time, not 1025"),
        (lambda s: s.get("k", timeout_s=0), "timeout_s is more than 0, not 0"),
    ],
)
def test_what_can_not_be_is_a_usage_error(call: Callable[[Any], object], text: str) -> None:
    def train(mesh: pmesh.Mesh) -> str:
        mesh.store.set("text", b"text")
        with pytest.raises(pmesh.errors.UsageError) as caught:
            call(mesh.store)
        return str(caught.value)

    assert text in SimulatedMesh(1).run(train)[0]


def test_a_store_that_is_full_names_the_key() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        for number in range(63):
            mesh.store.set(f"{number:04}", bytes(MIB))
        with pytest.raises(pmesh.errors.UsageError, match="the job's store is full: with key '63'"):
            mesh.store.set("63", bytes(MIB))
        mesh.store.set("small", b"fits")

    SimulatedMesh(1).run(train)


def test_a_key_that_nobody_sets_is_not_waited_for_beyond_the_timeout() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        for call in (mesh.store.get, lambda key, timeout_s: mesh.store.wait([key], timeout_s)):
            with pytest.raises(pmesh.OpTimedOut, match=r"'never'.* within 0.05 s"):
                cast("Any", call)("never", timeout_s=0.05)

    SimulatedMesh(1).run(train)


def test_values_outlive_their_rank_and_newcomers_find_them() -> None:
    simulated = SimulatedMesh(2, on_loss="continue")

    def train(mesh: pmesh.Mesh) -> bytes | None:
        if mesh.rank == 1:
            mesh.store.set("k", b"of rank 1")
            simulated.lose(1)
            return None
        mesh.sync({"x": 1})
        value = mesh.store.get("k")
        with simulated.connect() as late:
            with pytest.raises(pmesh.errors.UsageError, match=r"state = mesh\.sync"):
                late.store.get("k")
            entering = threading.Thread(target=late.sync, args=({"x": 2},))
            entering.start()
            while mesh.size < 2:
                mesh.sync({"x": 1})
            entering.join()
            assert late.store.get("k") == value
        return value

    assert simulated.run(train)[0] == b"of rank 1"


def test_a_call_after_the_end_says_that_the_mesh_is_closed() -> None:
    def train(mesh: pmesh.Mesh) -> None:
        mesh.store.set("k", b"")
        mesh.close()
        with pytest.raises(pmesh.MeshClosed):
            mesh.store.get("k")

    SimulatedMesh(1).run(train)
