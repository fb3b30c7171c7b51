# ruff: noqa: ANN401 - arrays of libraries that have no common type
"""What is kept from call to call: saved, loaded, told to other ranks and to `pmesh status`."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pmesh
from pmesh.client.collective.bucketed import take_apart
from pmesh.client.feedback.call import Share
from pmesh.client.feedback.memory import Feedback, in_memory
from pmesh.client.session.session import TrainerSession
from pmesh.compression import top_k
from pmesh.compression.schemes import INT8, PowerSGD, Scheme, TopK
from pmesh.core.wire.trainer import Connect, Joined
from pmesh.testing import SimulatedMesh
from tests.client.feedback.compressed import gradient
from tests.worlds.faults import Faults, Real
from tests.worlds.watched_agent import WatchedAgent, run_ranks


@pytest.mark.parametrize("scheme", [INT8(), TopK(0.1), PowerSGD(2, start_step=1)], ids=str)
def test_a_training_goes_on_from_its_saved_state_as_if_nothing_had_happened(
    scheme: Scheme,
) -> None:
    def steps(mesh: pmesh.Mesh, first: int, last: int) -> list[bytes]:
        return [
            mesh.average_gradients(gradient(mesh.rank, step), compression=scheme).tobytes()
            for step in range(first, last)
        ]

    def whole(mesh: pmesh.Mesh) -> tuple[list[bytes], Any]:
        steps(mesh, 0, 3)
        state = mesh.error_feedback_state()
        return steps(mesh, 3, 6), state

    expected = SimulatedMesh(2).run(whole)

    def resumed(mesh: pmesh.Mesh) -> list[bytes]:
        mesh.load_error_feedback_state(expected[mesh.rank][1])
        return steps(mesh, 3, 6)

    assert SimulatedMesh(2).run(resumed) == [bits for bits, _ in expected]


def test_the_state_is_a_copy_both_ways() -> None:
    def program(mesh: pmesh.Mesh) -> None:
        mesh.average_gradients(gradient(mesh.rank, 0), compression="topk")
        state = mesh.error_feedback_state()
        (key,) = [key for key in state if key.endswith("|residual")]
        kept = state[key].copy()
        state[key].fill(7)
        assert mesh.error_feedback_state()[key].tobytes() == kept.tobytes()
        mesh.load_error_feedback_state(state)
        state[key].fill(8)
        assert (mesh.error_feedback_state()[key] == 7).all()

    SimulatedMesh(2).run(program)


@pytest.mark.parametrize(
    "garbage",
    [
        {"": np.ones(1)},
        {"a|b|c|two|residual": np.ones(2)},
        {"a|b|c|2|residual": np.ones(3)},
        {"a|b|c|2|residual": np.ones((1, 2))},
        {"a|b|c|2|residual": np.array([1, np.nan])},
        {"a|b|c|2|residual": "text"},
        {"a|b|c|2|step": np.ones(3)},
        {3: np.ones(3)},
        [np.ones(3)],
    ],
)
def test_what_is_no_such_state_is_refused_and_changes_nothing(garbage: Any) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        mesh.average_gradients(gradient(mesh.rank, 0), compression="topk")
        before = mesh.error_feedback_state()
        with pytest.raises(pmesh.UsageError, match="not what error_feedback_state"):
            mesh.load_error_feedback_state(garbage)
        assert before.keys() == mesh.error_feedback_state().keys()

    SimulatedMesh(2).run(program)


def test_a_loaded_state_of_other_shapes_is_dropped_with_a_note(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = take_apart([np.zeros(4, np.float32)]), take_apart([np.zeros(5, np.float32)])
    feedback = Feedback()
    feedback.load({f"{_key_of(one)}|4|residual": np.arange(4)})
    assert feedback.of("", one).norm() == pytest.approx(14**0.5)
    assert feedback.of("", other).norm() is None
    assert ["dropped" in record.message for record in caplog.records] == [True]
    feedback.load({f"{_key_of(one)}|3|residual": np.zeros(3)})  # edited by hand
    assert feedback.of("", one).residuals == []


def _key_of(arrays: Any) -> str:
    feedback = Feedback()
    feedback.of("", arrays)
    (key,) = feedback.state()
    return key.rsplit("|", 2)[0]


def test_residuals_move_to_the_arenas_of_another_session() -> None:
    """As after an agent was restarted."""

    feedback, arrays = Feedback(), take_apart([np.zeros(3000, np.float32)])
    before = np.arange(3000, dtype=np.float32)
    feedback.load({f"{_key_of(arrays)}|3000|residual": before})
    memory = feedback.of("", arrays)
    asked: list[int] = []
    dropped: list[int] = []

    class Other:
        def has(self, _: object) -> bool:
            return bool(asked)

        def residuals(self, count: int) -> Any:
            asked.append(count)
            return in_memory(np.zeros(count, np.float32))

        def drop(self, residuals: Any) -> None:
            dropped.append(residuals.values.size)

    session: Any = Other()
    memory.divide((3000,), session, in_arenas=True)
    assert (asked, dropped) == ([3000], [])
    np.testing.assert_array_equal(memory.residual(), before)
    memory.divide((1000, 2000), session, in_arenas=False)
    assert (asked, dropped) == ([3000], [3000])  # the agent's memory is given back
    np.testing.assert_array_equal(memory.residual(), before)


def test_arrays_of_other_shapes_and_a_loaded_state_give_the_old_arenas_back(
    agent: WatchedAgent,
) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        for count in range(1, 6):
            mesh.average_gradients(np.ones(1000 * count, np.float32), compression="int8")
            mesh.load_error_feedback_state(mesh.error_feedback_state())
        mesh.average_gradients(np.ones(5000, np.float32), compression="int8")

    run_ranks(agent.home, 2, program)
    assert [len(session.inputs) for session in agent.sessions] == [3, 3]  # input, residuals


def test_without_room_for_all_residuals_those_made_are_given_back() -> None:
    def program(mesh: pmesh.Mesh) -> None:
        mesh.average_gradients(gradient(mesh.rank, 0), compression="topk")
        (memory,) = mesh._feedback._memories.values()  # noqa: SLF001 - what it stands on
        before, real = memory.residual(), mesh._place._session  # noqa: SLF001 - likewise
        made: list[Any] = []

        class Narrow:
            has, drop = real.has, real.drop

            def residuals(self, count: int) -> Any:
                if made:
                    raise pmesh.UsageError("no shared memory")
                made.append(real.residuals(count))
                return made[-1]

        session: Any = Narrow()
        with pytest.raises(pmesh.UsageError, match="no shared memory"):
            memory.divide((1000, 2000), session, in_arenas=True)
        assert not real.has(made[0])
        np.testing.assert_array_equal(memory.residual(), before)

    SimulatedMesh(2).run(program)


def test_the_agents_default_holds_for_gradients_that_name_nothing(agent: WatchedAgent) -> None:
    agent.compression = "int8"

    def program(mesh: pmesh.Mesh) -> list[tuple[str, str]]:
        x = np.ones(300, np.float32)
        told: list[tuple[str, str]] = []

        def note() -> None:
            assert mesh.last_op is not None
            told.append((mesh.last_op.compression, mesh.last_op.why))

        mesh.average_gradients(x)
        note()
        mesh.average_gradients(x, compression="none")
        note()
        mesh.average_gradients(x, compression="bf16")
        note()
        mesh.average_gradients(x, strategy="tree")
        note()
        mesh.all_reduce(x)
        note()
        group = mesh.group([0, 1])
        assert group is not None
        group.average_gradients(x)
        assert group.last_op is not None
        assert group.last_op.compression == "int8"
        return told

    assert (
        run_ranks(agent.home, 2, program)
        == [
            [
                ("int8", "the default of this machine's agent"),
                ("none", ""),
                ("bf16", ""),
                ("none", ""),
                ("none", ""),
            ]
        ]
        * 2
    )
    agent.wait_until(lambda: len(agent.left) == 4)  # the mesh's and the group's have read all
    assert sorted(agent.shown) == sorted(
        ["int8: the default of this machine's agent", "bf16"] * 2
        + ["int8: the default of this machine's agent"] * 2  # the group's
    )


def test_ranks_whose_agents_have_other_defaults_hear_of_it(
    agent: WatchedAgent, faults: Faults
) -> None:
    def join(real: Real, session: TrainerSession, request: Connect) -> Joined:  # as at two agents
        joined: Joined = real(session, request)
        return msgspec.structs.replace(joined, compression="int8" if joined.world.rank else "")

    faults.around(TrainerSession, "join", join)

    def program(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.OpMismatch, match="int8"):
            mesh.average_gradients(np.ones(3, np.float32))

    run_ranks(agent.home, 2, program)


def test_the_last_op_says_what_compression_came_to(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            x = gradient(mesh.rank, step)
            mesh.average_gradients(x, compression=PowerSGD(2, start_step=2))
            last = mesh.last_op
            assert last is not None
            assert last.bytes == x.nbytes
            if last.residual_norm is not None:
                (left,) = [
                    v for k, v in mesh.error_feedback_state().items() if k.endswith("|residual")
                ]
                assert last.residual_norm == pytest.approx(float(np.linalg.norm(left)))
            seen.append((last.compression, last.why, last.compressed_bytes))
        return seen

    nothing = ("none", "uncompressed before step 2", 0)
    expected = [nothing, nothing, ("powersgd(2, min_rate 2.0)", "", 2 * 4 * (60 + 50))]
    assert run_ranks(agent.home, 2, program) == [expected] * 2
    agent.wait_until(lambda: len(agent.left) == 2)  # each has read all that came before
    assert sorted(agent.shown) == sorted(
        ["none: uncompressed before step 2", "powersgd(2, min_rate 2.0)"] * 2
    )


def test_who_has_seen_fewer_steps_goes_on_with_the_others() -> None:
    """As a newcomer does: it neither begins uncompressed, nor draws the places of a first call."""
    schemes = (PowerSGD(1, start_step=3), pmesh.RandomK(0.1, model="other"))

    def steps(mesh: pmesh.Mesh, first: int, last: int) -> list[tuple[bytes, str]]:
        seen: list[tuple[bytes, str]] = []
        for step in range(first, last):
            for scheme in schemes:
                out = mesh.average_gradients(gradient(mesh.rank, step), compression=scheme)
                assert mesh.last_op is not None
                seen.append((out.tobytes(), mesh.last_op.compression))
        return seen

    def founders(mesh: pmesh.Mesh) -> dict[str, Any]:
        steps(mesh, 0, 4)
        return mesh.error_feedback_state()

    state, _ = SimulatedMesh(2).run(founders)

    def with_a_newcomer(mesh: pmesh.Mesh) -> list[tuple[bytes, str]]:
        if mesh.rank == 0:
            mesh.load_error_feedback_state(state)
        return steps(mesh, 4, 6)

    first, second = SimulatedMesh(2).run(with_a_newcomer)
    assert first == second
    assert {name for _, name in first[::2]} == {"powersgd(1, min_rate 2.0)"}


def test_where_no_matrix_pays_power_sgd_is_one_ordinary_op(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> list[float]:
        return list(mesh.all_reduce(np.ones(3, np.float32), compression=PowerSGD(4)))

    assert run_ranks(agent.home, 2, program) == [[2.0] * 3] * 2
    assert [call.kind for call in agent.calls] == ["all_reduce"]


def test_power_sgd_goes_on_from_its_last_call_where_that_was_of_the_same_arrays() -> None:
    """The same matrix again and again, and no feedback: the power iteration alone gets better."""
    rough = PowerSGD(1, start_step=0, error_feedback=False)

    def program(mesh: pmesh.Mesh) -> tuple[list[float], set[bytes]]:
        x = gradient(0, 0)
        errors = [
            float(np.linalg.norm(mesh.average_gradients(x, compression=rough) - x))
            for _ in range(20)
        ]
        assert mesh.last_op is not None
        assert mesh.last_op.residual_norm is None
        apart = {mesh.all_reduce(x, "mean", compression=PowerSGD(1)).tobytes() for _ in range(3)}
        assert mesh.last_op.compression == "powersgd(1, min_rate 2.0)"  # at once
        return errors, apart

    for errors, apart in SimulatedMesh(2).run(program):
        assert errors[-1] < errors[1] < errors[0]
        assert len(apart) == 1


def test_a_warm_start_of_another_size_is_not_used() -> None:
    scheme = PowerSGD(1, start_step=0)

    def program(mesh: pmesh.Mesh, *, garbled: bool) -> bytes:
        mesh.average_gradients(gradient(mesh.rank, 0), compression=scheme)
        state = mesh.error_feedback_state()
        (key,) = [key for key in state if key.endswith("powersgd(1, min_rate 2.0)")]
        state[key].fill(3)
        assert (mesh.error_feedback_state()[key] != 3).any()  # a copy
        state = mesh.error_feedback_state()
        if garbled:
            state[key] = state[key][:7]
        mesh.load_error_feedback_state(state)
        return bytes(mesh.average_gradients(gradient(mesh.rank, 1), compression=scheme))

    def both(*, garbled: bool) -> list[bytes]:
        return SimulatedMesh(2).run(lambda mesh: program(mesh, garbled=garbled))

    assert len({*both(garbled=True), *both(garbled=False)}) == 2


def test_power_sgd_takes_two_ops_however_large_the_tree(agent: WatchedAgent) -> None:
    def program(mesh: pmesh.Mesh) -> None:
        grads = [gradient(mesh.rank, step) for step in range(4)]
        mesh.average_gradients(grads, bucket_bytes=1000, compression=PowerSGD(1, start_step=0))

    run_ranks(agent.home, 2, program)
    assert [call.kind for call in agent.calls] == ["exchange", "all_reduce", "all_reduce"]


def test_garbage_among_the_payloads_is_an_error_on_all_ranks(
    agent: WatchedAgent, faults: Faults
) -> None:
    faults.fail(top_k, "accumulate", ValueError("an index too large"))

    def program(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.RunError, match=r"not topk\(0.01\): an index too large"):
            mesh.all_reduce(np.ones(3, np.float32), compression="topk")

    run_ranks(agent.home, 2, program)


rows = st.builds(
    Share,
    st.floats(0, allow_infinity=False),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    st.just(value=False),  # it does not travel
)


@given(rows)
def test_a_share_travels_as_a_row_of_integers(share: Share) -> None:
    assert Share.of_row(np.array(share.to_row(), np.int64).tolist()) == share
