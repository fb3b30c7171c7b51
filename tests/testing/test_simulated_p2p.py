"""send and recv between simulated ranks, as on a real mesh."""

import numpy as np
import pytest

import pmesh
from pmesh.testing import SimulatedMesh


def pair(one: object, other: object) -> list[object]:
    programs = (one, other)
    return SimulatedMesh(2).run(lambda mesh: programs[mesh.rank](mesh))  # type: ignore[operator] # they are


def test_what_one_sends_the_other_receives_as_it_was() -> None:
    sent = np.arange(6, dtype=np.float16).reshape(2, 3)

    def receive(mesh: pmesh.Mesh) -> tuple[object, ...]:
        got = mesh.recv(0)
        return got.dtype, got.tolist(), mesh.last_source

    _, got = pair(lambda mesh: mesh.send(sent, 1), receive)
    assert got == (sent.dtype, sent.tolist(), 0)


def test_messages_of_a_tag_keep_their_order_and_tags_do_not_mix() -> None:
    def send(mesh: pmesh.Mesh) -> None:
        handles = [mesh.send(np.array([i]), 1, tag=i % 2, async_op=True) for i in range(6)]
        for handle in handles:
            handle.wait()

    def receive(mesh: pmesh.Mesh) -> list[int]:
        return [int(mesh.recv(0, tag=tag)[0]) for tag in (1, 1, 0, 1, 0, 0)]

    assert pair(send, receive)[1] == [1, 3, 0, 5, 2, 4]


def test_each_rank_passes_on_to_the_next_without_waiting_for_the_others_turn() -> None:
    def rotate(mesh: pmesh.Mesh) -> int:
        to, from_ = (mesh.rank + 1) % 3, (mesh.rank - 1) % 3
        return int(mesh.sendrecv(np.array([mesh.rank]), to, from_)[0])

    assert SimulatedMesh(3).run(rotate) == [2, 0, 1]


def test_any_takes_whoever_comes_first() -> None:
    def program(mesh: pmesh.Mesh) -> set[int]:
        if mesh.rank:
            mesh.send(np.array([mesh.rank]), 0)
            return set()
        return {int(mesh.recv(pmesh.ANY)[0]) for _ in range(2)}

    assert SimulatedMesh(3).run(program)[0] == {1, 2}


def test_a_send_that_nobody_takes_and_a_receive_of_nothing_time_out() -> None:
    def program(mesh: pmesh.Mesh) -> None:
        call = (
            (lambda: mesh.recv(1, timeout_s=0.01))
            if mesh.rank == 0
            else (lambda: mesh.send(np.zeros(1), 0, tag=7, timeout_s=0.01))
        )
        with pytest.raises(pmesh.OpTimedOut):
            call()
        mesh.barrier()

    SimulatedMesh(2).run(program)


def test_a_handle_may_be_looked_at_and_waited_for_again() -> None:
    def receive(mesh: pmesh.Mesh) -> int:
        handle = mesh.recv(1, async_op=True)
        assert not handle.done()
        with pytest.raises(TimeoutError):
            handle.wait(0.01)
        mesh.barrier()
        result = handle.wait()
        assert handle.done()
        return int(result[0])

    def send(mesh: pmesh.Mesh) -> None:
        mesh.barrier()
        mesh.send(np.array([4]), 0)

    assert pair(receive, send)[0] == 4


def test_who_waits_for_a_lost_rank_hears_of_it() -> None:
    def receive(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.RankLost, match="rank 1 is lost"):
            mesh.recv(1)

    pair(receive, lambda _: None)


def test_closing_the_mesh_ends_what_waits_in_another_thread() -> None:
    def program(mesh: pmesh.Mesh) -> None:
        handle = mesh.recv(1, async_op=True)
        mesh.barrier()
        mesh.close()
        with pytest.raises(pmesh.MeshClosed):
            handle.wait()

    def other(mesh: pmesh.Mesh) -> None:
        mesh.barrier()

    pair(program, other)
