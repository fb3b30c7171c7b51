"""Where ranks, sizes and stores come from, and what is said where there are none."""

import subprocess
import sys

import pytest
import torch.distributed as dist

import pmesh.torch
from tests.torch.conftest import RankPrograms
from tests.worlds.faults import Faults

pytestmark = [pytest.mark.slow, pytest.mark.measured]


@pytest.mark.parametrize(
    "program",
    [
        *("by_options", "twice_by_url", "with_a_loss", "with_compression", "of_other_models"),
        *("by_a_launch", "partly_by_a_launch", "for_other_backends"),
    ],
)
def test_ranks_come_from_the_mesh(programs: RankPrograms, program: str) -> None:
    assert programs.run("tests.torch.starts", program, PMESH_JOB=program) == [0, 0, 0]


@pytest.mark.parametrize(
    "program",
    [
        *("with_ranks_given", "by_a_launcher", "by_a_launcher_of_one", "beside_gloo"),
        *("of_other_sizes", "without_an_agent"),
    ],
)
def test_ranks_that_are_given_stay(programs: RankPrograms, program: str) -> None:
    folder = programs.folder / program
    folder.mkdir()
    assert programs.run("tests.torch.starts", program, str(folder)) == [0, 0, 0]


@pytest.mark.parametrize("first", ["torch", "pmesh.torch", "pmesh.torch.options"])
def test_the_backend_is_there_whichever_is_imported_first(first: str) -> None:
    """torch's autoload calls `register`, in the middle of an import of ours too."""
    program = (
        "import importlib.metadata as m;"
        "loads = m.EntryPoint('pmesh', 'pmesh.torch:register', 'torch.backends');"
        "m.entry_points = lambda **_: [loads];"  # also where pmesh has not been installed
        f"import {first}, torch.distributed as dist; assert dist.Backend('pmesh') == 'pmesh';"
        "assert 'PMESH' in dist.Backend._plugins"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert done.returncode == 0, done.stderr


AUTOLOAD = (
    "import importlib.metadata as m, sys;"
    "loads = m.EntryPoint('pmesh', 'pmesh.torch:register', 'torch.backends');"
    "m.entry_points = lambda **_: [loads];"
)


def import_torch(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", AUTOLOAD + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("broken", ["pmesh.torch.rendezvous", "pmesh.torch.library"])
def test_import_torch_works_where_pmesh_is_broken_and_says_so_once(broken: str) -> None:
    done = import_torch(f"sys.modules['{broken}'] = None; import torch, pmesh.torch")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "pmesh" in line]
    assert len(said) == 1
    assert said[0].startswith("torch.distributed has no backend 'pmesh' in this program: ModuleNot")
    assert said[0].endswith("; install pmesh again, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0")


def test_import_torch_brings_eight_small_modules_and_no_library() -> None:
    """Who never uses pmesh does not wait for it, nor for what reads its settings."""
    done = import_torch(
        "import torch; print(*sorted(n for n in sys.modules if n.split('.')[0] in"
        " ('pmesh', 'msgspec', 'trio', 'nacl', 'zeroconf', 'structlog', 'rich', 'platformdirs')))",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "pmesh",
        "pmesh.errors",
        "pmesh.installed",
        "pmesh.texts",
        "pmesh.torch",
        "pmesh.torch.library",
        "pmesh.torch.plugs",
        "pmesh.torch.rendezvous",
    ]


def test_a_launch_may_let_pmesh_answer_for_other_backends() -> None:
    """Also where a module of torch has its own name for the function."""
    done = import_torch(
        "import os; os.environ['PMESH_BACKEND'] = 'pmesh'; import torch.distributed as dist;"
        "from torch.distributed import device_mesh;"
        "assert dist.new_group.__wrapped__ is not dist.new_group;"
        "assert device_mesh.init_process_group is dist.init_process_group"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("error", [ImportError("x"), SyntaxError("x"), OSError("x"), KeyError("x")])
def test_no_error_of_the_registration_reaches_who_imports_torch(
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults.fail(pmesh.torch, "_register", error)
    monkeypatch.setattr(pmesh.torch, "_failures", [])
    pmesh.torch.register()
    pmesh.torch.register()
    assert len(caplog.messages) == 1
    assert type(error).__name__ in caplog.messages[0]


def test_ctrl_c_in_the_registration_ends_the_program(faults: Faults) -> None:
    faults.fail(pmesh.torch, "_register", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        pmesh.torch.register()


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR"])
def test_who_misses_what_a_launcher_sets_reads_who_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "PMESH_JOB", "PMESH_WAIT_FOR"):
        monkeypatch.delenv(name, raising=False)
    if missing == "MASTER_ADDR":
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")

    def told() -> list[str]:
        """By the error of torch, and below that of a script that reads the variable itself."""
        with pytest.raises(ValueError, match=missing) as caught:
            dist.init_process_group("gloo")
        sys.excepthook(KeyError, KeyError(missing), None)
        return [str(caught.value), capsys.readouterr().err]

    hint = f"Nothing has set {missing}. init_process_group('pmesh') finds the ranks in the mesh"
    assert not any(hint in text for text in told())  # it has nothing to do with pmesh
    monkeypatch.setenv("PMESH_WAIT_FOR", "2")
    for text in told():
        assert hint in text
        assert "'pmesh run --on all' sets RANK, WORLD_SIZE, MASTER_ADDR" in text
