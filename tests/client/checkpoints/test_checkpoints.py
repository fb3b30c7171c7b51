"""`pmesh.Checkpoints` among the ranks of a simulated mesh, each with a folder of its own."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

import pmesh
from pmesh.client.checkpoints import checkpoints as module
from pmesh.client.checkpoints import files
from pmesh.testing import SimulatedMesh
from tests.worlds.faults import Faults, InjectedFault, Real

Values = Any


def state_at(step: int) -> dict[str, Any]:
    """Arrays of several libraries, dtypes and sizes, and the plain values of a training."""
    return {
        "layers": [np.full((50, 7), step, np.float32), {"bias": np.full(3, step, np.float64)}],
        "mlx": mx.full((11,), step, dtype=mx.bfloat16),
        "random": np.random.PCG64(step).state,
        "position": step,
        "odd": np.full(5, step, np.uint8),
        "swapped": np.arange(4, dtype=">f4"),
        "nothing": None,
        "empty": np.empty((0, 4), np.float32),
    }


def assert_equal(found: Any, expected: Any) -> None:  # noqa: ANN401 - any tree
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, mx.array):
        assert found.dtype == expected.dtype
        assert mx.array_equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


def save(base: Path, size: int, *steps: int, **options: Any) -> list[list[bool]]:  # noqa: ANN401
    def train(mesh: pmesh.Mesh) -> list[bool]:
        with pmesh.Checkpoints(base / str(mesh.rank), mesh, **options) as checkpoints:
            return [checkpoints.save(state_at(step), step, own=mesh.rank) for step in steps]

    return SimulatedMesh(size).run(train)


def load(base: Path, size: int, like: object = None) -> list[Any]:
    def begin(mesh: pmesh.Mesh) -> Any:  # noqa: ANN401 - what was saved
        with pmesh.Checkpoints(base / str(mesh.rank), mesh) as checkpoints:
            found = checkpoints.load(like)
            if found is not None:
                mx.eval(found.state["mlx"])  # MLX's streams belong to threads
            return found

    return SimulatedMesh(size).run(begin)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_number_of_ranks_loads_what_three_have_saved(tmp_path: Path, size: int) -> None:
    save(tmp_path, 3, 7)

    for rank, loaded in enumerate(load(tmp_path, size)):
        assert loaded.step == 7
        assert_equal(loaded.state, state_at(7))
        assert loaded.own == (rank if rank < 3 else None)


def test_a_part_of_which_every_copy_is_away_names_the_machines(tmp_path: Path) -> None:
    save(tmp_path, 3, 7)

    with pytest.raises(pmesh.NotEnoughRanks, match="step 7 lacks part 3 of 3, saved by simulated"):
        load(tmp_path, 1)


def test_without_a_save_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert load(tmp_path, 2) == [None, None]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_old_saves_are_removed_once_later_ones_are_whole(
    tmp_path: Path, *, asynchronous: bool
) -> None:
    save(tmp_path, 2, 1, 2, 3, 4, keep=2, asynchronous=asynchronous)

    left = sorted(int(path.name.split("-")[3]) for path in (tmp_path / "0").iterdir())
    assert left == ([2, 3, 4] if asynchronous else [3, 4])  # the last one is not known to be whole


def test_with_a_time_between_saves_one_call_in_that_time_saves(tmp_path: Path) -> None:
    assert save(tmp_path, 2, 1, 2, every_s=3600) == [[False, False]] * 2
    assert save(tmp_path, 2, 1, every_s=0) == [[True]] * 2


def test_a_last_save_is_made_though_it_is_not_time(tmp_path: Path) -> None:
    def train(mesh: pmesh.Mesh) -> list[bool]:
        with pmesh.Checkpoints(tmp_path / str(mesh.rank), mesh, every_s=3600) as checkpoints:
            # one rank that says so is enough: all agree
            return [
                checkpoints.save(state_at(1), 1, now=last and mesh.rank == 1)
                for last in (False, True)
            ]

    assert SimulatedMesh(2).run(train) == [[False, True]] * 2
    assert [loaded.step for loaded in load(tmp_path, 2)] == [1, 1]


def test_a_run_that_was_too_short_for_any_save_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 1, 2, every_s=3600)
    assert "nothing was saved in " in caplog.text
    assert "now=True at the last step" in caplog.text
    caplog.clear()

    def train(mesh: pmesh.Mesh) -> None:
        with pmesh.Checkpoints(tmp_path, mesh, every_s=3600) as checkpoints:
            checkpoints.save(state_at(1), 1, now=True)
            checkpoints.wait()
            checkpoints.save(state_at(2), 2)
        pmesh.Checkpoints(tmp_path, mesh, every_s=3600).close()

    SimulatedMesh(1).run(train)
    assert not caplog.text


def test_a_folder_that_leads_nowhere_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    def refused(mesh: pmesh.Mesh) -> None:
        with pytest.raises(pmesh.UsageError, match="the system knows no home directory of ~no-one"):
            pmesh.Checkpoints("~no-one/x", mesh)
        with pytest.raises(pmesh.UsageError, match=r"'x'\): .*; give another folder"):
            pmesh.Checkpoints("x", mesh)

    SimulatedMesh(1).run(refused)


def test_a_folder_in_the_copy_of_one_launch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (tmp_path / "link").symlink_to(copy)
    monkeypatch.setenv("PMESH_COPY", str(copy))
    monkeypatch.chdir(copy)

    def refused(mesh: pmesh.Mesh) -> None:
        for folder in ("runs/ckpt", copy / "ckpt", tmp_path / "link" / "ckpt", "."):
            with pytest.raises(pmesh.UsageError, match="lies in this launch's own copy"):
                pmesh.Checkpoints(folder, mesh)
        with pytest.raises(pmesh.UsageError, match=r"such as Checkpoints\('~/checkpoints/ckpt'\)"):
            pmesh.Checkpoints("runs/ckpt", mesh)
        pmesh.Checkpoints(tmp_path / "ckpt", mesh).close()

    SimulatedMesh(1).run(refused)


def test_others_read_a_part_by_the_paths_of_the_state(tmp_path: Path) -> None:
    save(tmp_path, 1, 7)

    (part,) = tmp_path.glob("0/save-*/part-*.safetensors")
    arrays = load_file(part)
    np.testing.assert_array_equal(arrays["layers.0"], state_at(7)["layers"][0])
    np.testing.assert_array_equal(arrays["layers.1.bias"], state_at(7)["layers"][1]["bias"])


def test_others_read_all_arrays_whatever_their_paths(tmp_path: Path) -> None:
    names = "", "state", "a.b", "__metadata__", "a.b#2"
    state = {name: np.full(1, n) for n, name in enumerate(names)} | {"a": {"b": np.full(1, 5)}}

    def train(mesh: pmesh.Mesh) -> None:
        with pmesh.Checkpoints(tmp_path, mesh) as checkpoints:
            checkpoints.save(state, 1)

    SimulatedMesh(1).run(train)
    (part,) = tmp_path.glob("save-*/part-*.safetensors")
    assert sorted(float(x[0]) for x in load_file(part).values()) == [0, 1, 2, 3, 4, 5]


def test_a_damaged_part_is_taken_from_the_other_rank_that_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 3, 7)
    (part,) = tmp_path.glob("0/save-*/part-00001-*")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)

    for loaded in load(tmp_path, 3):
        assert_equal(loaded.state, state_at(7))
    assert f"{part} is damaged: its bytes are not those that were saved" in caplog.text


def test_if_all_copies_of_a_part_are_damaged_the_save_before_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 3, 7, 8)
    for part in tmp_path.glob("*/save-*-step-8-*/part-00002-*"):
        part.write_bytes(b"")

    assert [loaded.step for loaded in load(tmp_path, 3)] == [7, 7, 7]
    assert "step 8 lacks part 2 of 3, saved by simulated; step 7 is loaded" in caplog.text


def test_a_damaged_manifest_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 2, 7)
    (manifest,) = tmp_path.glob("0/save-*/rank-*.json")
    manifest.write_bytes(manifest.read_bytes()[:-9])

    assert [loaded.step for loaded in load(tmp_path, 2)] == [7, 7]
    assert f"{manifest} is damaged" in caplog.text


def test_if_every_manifest_is_damaged_nobody_begins_anew(tmp_path: Path) -> None:
    save(tmp_path, 2, 7)
    for manifest in tmp_path.glob("*/save-*/rank-*.json"):
        manifest.write_bytes(manifest.read_bytes()[:100])

    with pytest.raises(pmesh.UsageError, match=r"no checkpoint can be read: .*json is damaged"):
        load(tmp_path, 2)


def test_a_save_of_another_model_names_what_differs(tmp_path: Path) -> None:
    save(tmp_path, 1, 7)
    other = state_at(7) | {"odd": np.zeros(6, np.uint8)}

    match = r"step 7 in .* is of another model: odd: \(6,\) uint8 here, \(5,\) uint8 on disk"
    with pytest.raises(pmesh.UsageError, match=match):
        load(tmp_path, 1, other)


def test_states_that_differ_are_refused_on_all_ranks(tmp_path: Path) -> None:
    def train(mesh: pmesh.Mesh) -> None:
        with pmesh.Checkpoints(tmp_path / str(mesh.rank), mesh) as checkpoints:
            checkpoints.save({"seed": mesh.rank}, 1)

    with pytest.raises(pmesh.UsageError, match=r"rank 1 \(simulated\) has other .* plain values"):
        SimulatedMesh(2).run(train)


@pytest.mark.parametrize("library", ["numpy", "mlx"])
def test_what_is_written_to_an_array_after_save_is_not_in_the_save(
    tmp_path: Path, faults: Faults, library: str
) -> None:
    go = threading.Event()
    write_save = files.write_save

    def later(*args: Any) -> Any:  # noqa: ANN401 - as the original
        assert go.wait(20)
        return write_save(*args)

    faults.instead(module, "write_save", later)

    def train(mesh: pmesh.Mesh) -> Any:  # noqa: ANN401 - an array
        x: Any = np.zeros(1000) if library == "numpy" else mx.zeros(1000)
        mx.eval(x) if library == "mlx" else None
        with pmesh.Checkpoints(tmp_path, mesh) as checkpoints:
            checkpoints.save({"x": x}, 1)
            x += 1
            if library == "mlx":
                mx.eval(x)
            go.set()
            checkpoints.wait()
            loaded = checkpoints.load()
            assert loaded is not None
            return np.array(loaded.state["x"])

    (found,) = SimulatedMesh(1).run(train)
    assert not found.any()


def test_a_save_after_ctrl_c_waits_for_the_one_under_way(tmp_path: Path, faults: Faults) -> None:
    go, waited, written = threading.Event(), list[bool](), list[int]()
    write_save = files.write_save

    def later(folder: Path, manifest: Any, arrays: Any, *more: Any) -> Any:  # noqa: ANN401 - as the original
        assert go.wait(20)
        written.append(int(max(each.view(float).max() for each in arrays)))
        return write_save(folder, manifest, arrays, *more)

    def interrupt(under_way: Any) -> Any:  # noqa: ANN401 - as the original
        if not waited:
            waited.append(True)
            raise KeyboardInterrupt
        go.set()
        return wait(under_way)

    faults.instead(module, "write_save", later)
    faults.instead(module, "wait", interrupt)

    def train(mesh: pmesh.Mesh) -> list[float]:
        with pmesh.Checkpoints(tmp_path, mesh) as checkpoints:
            checkpoints.save({"x": np.zeros(1000)}, 1)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.wait()
            checkpoints.save({"x": np.ones(1000)}, 2)  # into the memory that the first was in
            checkpoints.wait()
            loaded = checkpoints.load()
            assert loaded is not None
            return [float(np.max(loaded.state["x"])), *map(float, written)]

    assert SimulatedMesh(1).run(train) == [[1, 0, 1]]


@pytest.mark.parametrize("options", [{"keep": 0}, {"replicas": 0}, {"every_s": -1}])
def test_numbers_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(pmesh.UsageError, match="keep and replicas are at least 1"):
        save(tmp_path, 1, 1, **options)


@pytest.mark.parametrize("step", [np.int64(7), 7])
def test_a_step_may_be_a_number_of_numpy(tmp_path: Path, step: Any) -> None:  # noqa: ANN401
    assert save(tmp_path, 2, step) == [[True]] * 2
    assert [found.step for found in load(tmp_path, 2)] == [7] * 2


@pytest.mark.parametrize("step", [1.5, "7", None, 2**63, np.ones(2, int), np.array(7.0)])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path: Path, step: Any) -> None:  # noqa: ANN401
    def train(mesh: pmesh.Mesh) -> None:
        with (
            pmesh.Checkpoints(tmp_path, mesh) as checkpoints,
            pytest.raises(pmesh.UsageError, match="a save is a whole number of 64 bits, not"),
        ):
            checkpoints.save({}, step)

    SimulatedMesh(1).run(train)


def test_after_close_a_save_is_refused_before_other_ranks_take_part(tmp_path: Path) -> None:
    def train(mesh: pmesh.Mesh) -> None:
        checkpoints = pmesh.Checkpoints(tmp_path / str(mesh.rank), mesh)
        checkpoints.close()
        if mesh.rank:
            with pytest.raises(pmesh.UsageError, match="these checkpoints are closed"):
                checkpoints.save({}, 1)
        mesh.barrier()

    SimulatedMesh(2).run(train)


def test_a_folder_that_cannot_be_written_names_itself_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "0").write_text("no folder can be made here")

    def train(mesh: pmesh.Mesh) -> bool:
        folder = tmp_path / str(mesh.rank) / "saves"
        with pmesh.Checkpoints(folder, mesh, asynchronous=False) as checkpoints:
            return checkpoints.save(state_at(1), 1)  # rank 1 has all parts

    assert SimulatedMesh(2).run(train) == [True, True]
    assert f"can't save step 1 in {tmp_path / '0' / 'saves'}" in caplog.text
    assert "give Checkpoints a folder on another disk" in caplog.text


def test_a_save_that_lacks_a_part_is_an_error_on_all_ranks_if_they_wait_for_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "0").write_text("no folder can be made here")

    def train(mesh: pmesh.Mesh) -> str:
        folder = tmp_path / str(mesh.rank) / "saves"
        with pmesh.Checkpoints(folder, mesh, replicas=1, asynchronous=False) as checkpoints:
            with pytest.raises(pmesh.UsageError) as caught:
                checkpoints.save(state_at(1), 1)
            return str(caught.value)

    first, second = SimulatedMesh(2).run(train)
    assert first == second
    assert first.startswith("step 1 is not saved: can't save step 1")


def test_a_rank_that_is_lost_in_a_save_costs_the_others_neither_the_save_nor_the_training(
    tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    simulated = SimulatedMesh(3, on_loss="continue")
    together = threading.Barrier(3)

    def gathered(gather: Real, mesh: pmesh.Mesh, *arguments: Any) -> object:  # noqa: ANN401 - as the original
        if mesh.size == 3:
            together.wait(20)
            if mesh.rank == 1:
                simulated.lose(1)
            gather(mesh, *arguments)
            raise pmesh.RosterChanged("a rank was lost between the call's two ops")
        return gather(mesh, *arguments)

    faults.around(pmesh.Mesh, "all_gather_object", gathered)

    def train(mesh: pmesh.Mesh) -> bool:
        folder = tmp_path / str(mesh.rank)
        with pmesh.Checkpoints(folder, mesh, asynchronous=False) as checkpoints:
            return checkpoints.save(state_at(5), 5)

    assert simulated.run(train) == [True, True]
    assert "a rank was lost in a save; the others save without it" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2"]
    (tmp_path / "2").rename(tmp_path / "1")
    assert [loaded.step for loaded in load(tmp_path, 2)] == [5, 5]


def test_a_rank_that_is_lost_while_loading_costs_the_others_nothing(
    tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 2, 5)
    simulated = SimulatedMesh(3, on_loss="continue")
    together = threading.Barrier(3)

    def told(tell: Real, mesh: pmesh.Mesh, *arguments: Any) -> object:  # noqa: ANN401 - as the original
        if mesh.size == 3:
            together.wait(20)
            if mesh.rank == 1:
                simulated.lose(1)
        return tell(mesh, *arguments)

    faults.around(pmesh.Mesh, "broadcast_object", told)

    def train(mesh: pmesh.Mesh) -> int:
        with pmesh.Checkpoints(tmp_path / str(mesh.rank), mesh) as checkpoints:
            found = checkpoints.load()
            assert found is not None
            return found.step

    assert simulated.run(train) == [5, 5]
    assert "a rank was lost while loading; the others begin again" in caplog.text


# --- what a rank that lies can do to the disks of others


def lying(faults: Faults, lie: Callable[[list[Any]], object]) -> InjectedFault:
    """From now on rank 0 changes what it tells the others before a save."""

    def gathered(gather: Real, mesh: pmesh.Mesh, obj: object, *more: Any) -> object:  # noqa: ANN401 - as the original
        said = msgspec.msgpack.decode(msgspec.msgpack.encode(obj))
        if mesh.rank == 0 and len(said) > 2:
            lie(said)
        return gather(mesh, said, *more)

    return faults.around(pmesh.Mesh, "all_gather_object", gathered)


def claim(serial: int, names: Sequence[str] = ("a",)) -> list[Any]:
    """A save that is nowhere."""
    return [[serial, 9, "feed"], "layout", list(names), 1, {0: "digest"}]


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[3]) for path in folder.iterdir())


def test_no_rank_chooses_where_another_one_writes_or_removes(
    tmp_path: Path, faults: Faults
) -> None:
    """Its id of a save is no part of a path; in the old way this removed all that was there."""
    precious = tmp_path / "precious"
    (precious / "part-00002-of-00002.safetensors" / "so that the write fails").mkdir(parents=True)
    before = sorted(precious.rglob("*"))
    lying(faults, lambda said: said.__setitem__(0, "x/../../precious"))

    assert save(tmp_path, 2, 1) == [[True], [True]]

    assert sorted(precious.rglob("*")) == before
    assert steps_in(tmp_path / "1") == [1]
    assert [loaded.step for loaded in load(tmp_path, 2)] == [1, 1]


@pytest.mark.parametrize("serial", [10**9, 2**62 - 2])
def test_claims_of_another_rank_make_no_save_go_and_use_up_no_numbers(
    tmp_path: Path, faults: Faults, serial: int
) -> None:
    save(tmp_path, 2, 1, 2, 3)
    with lying(faults, lambda said: said[-1].extend(claim(serial + n) for n in range(3))):
        save(tmp_path, 2, 4)
    assert steps_in(tmp_path / "1") == [1, 2, 3, 4]

    save(tmp_path, 2, 5)
    assert steps_in(tmp_path / "1") == [2, 3, 4, 5]
    assert [loaded.step for loaded in load(tmp_path, 2)] == [5, 5]


def test_a_rank_that_claims_more_than_it_has_of_a_save_does_not_change_what_the_others_have(
    tmp_path: Path, faults: Faults
) -> None:
    """It says that the saves have one part, which it has; the others know that there are two."""

    def shrink(said: list[Any]) -> None:
        for holding in said[-1]:
            holding[2:] = [["a"], 1, {0: "digest"}]

    save(tmp_path, 2, 1, 2, 3, keep=1, replicas=1)
    assert steps_in(tmp_path / "1") == [2, 3]
    for part in (tmp_path / "1").glob("save-*-step-3-*/part-*"):
        part.unlink()
    lying(faults, shrink)
    save(tmp_path, 2, 4, keep=1, replicas=1)
    assert steps_in(tmp_path / "1") == [2, 3, 4]


def test_what_no_pmesh_says_of_its_saves_names_the_rank(tmp_path: Path, faults: Faults) -> None:
    lying(faults, lambda said: said[-1].append(claim(1, names=[])))

    with pytest.raises(pmesh.PeerError, match=r"rank 0 \(simulated\) says of its saves what no"):
        save(tmp_path, 2, 1)
