"""Faults of this machine, made for real: `pmesh doctor` names each first."""

import errno
import json
import socket as sockets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from pmesh.agent.schema import encode_status
from pmesh.cli.app import run
from pmesh.cli.doctor import programs
from pmesh.cli.doctor.programs import can_listen, find_other_packages, holder_of, program_text
from pmesh.core.identity.keys import MeshKey, mesh_key_text
from pmesh.core.wire.control import StatusReply
from pmesh.core.wire.framing import frame
from pmesh.core.wire.link import PROTOCOL_VERSION
from pmesh.core.wire.session import encode
from pmesh.home_paths import MESH_KEY_NAME, NODE_KEY_NAME, home_directory, socket_path
from tests.cli.homes import use_home
from tests.worlds.fake_status_agent import SNAPSHOT, agent_at
from tests.worlds.faults import Faults

KEY = mesh_key_text(MeshKey(bytes(range(32))))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home as an agent leaves it, and a port that nobody has."""
    use_home(tmp_path, monkeypatch)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PMESH_LISTEN", "127.0.0.1:0")
    for name, content in ((MESH_KEY_NAME, KEY.encode()), (NODE_KEY_NAME, bytes(range(32)))):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_bytes(content)
    return home_directory()


def call_doctor(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the first finding that is no good news."""
    code = run(["doctor", "--json", *options])
    report: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    assert report["exit_code"] == code
    return code, next(f for f in report["findings"] if f["verdict"] in {"remark", "cause"})


def answer_with(**changed: Any) -> Callable[[sockets.socket], None]:  # noqa: ANN401 - fields
    status = msgspec.structs.replace(SNAPSHOT, **changed)

    def answer(connection: sockets.socket) -> None:
        connection.recv(4096)
        connection.sendall(frame(encode(StatusReply(encode_status(status)))))

    return answer


def open_to_others(home: Path) -> None:
    home.chmod(0o755)


def readable_key(home: Path) -> None:
    (home / MESH_KEY_NAME).chmod(0o644)


def no_key(home: Path) -> None:
    (home / MESH_KEY_NAME).unlink()


def broken_key(home: Path) -> None:
    (home / MESH_KEY_NAME).write_text("pmesh-aaaa")


def cut_node_key(home: Path) -> None:
    (home / NODE_KEY_NAME).write_bytes(b"short")


def wrong_setting(home: Path) -> None:
    (home / "config.toml").write_text("prot = 3")


def left_socket(home: Path) -> None:
    with sockets.socket(sockets.AF_UNIX) as left:
        left.bind(str(socket_path(home)))


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (open_to_others, ("home", "other users can enter it", "run: chmod 700")),
        (readable_key, ("key", "other users can read", "run: chmod 600")),
        (no_key, ("key", "there is no mesh key in", "pmesh join CODE")),
        (broken_key, ("key", "holds no mesh key", "pmesh key set")),
        (cut_node_key, ("key", "holds 5 bytes", "run: mv")),
        (wrong_setting, ("settings", "unknown key 'prot'", "")),
        (left_socket, ("agent", "one that was killed has left its socket", "pmesh up")),
        (lambda _: None, ("agent", "no agent runs with this home", "pmesh up")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_of_the_home_is_named_first(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    plant: Callable[[Path], None],
    named: tuple[str, str, str],
) -> None:
    plant(home)
    check, words, todo = named
    code, first = call_doctor(capsys)
    assert (code, first["check"], first["verdict"]) == (1, check, "cause")
    assert words in first["found"]
    assert todo in first["todo"]


def test_lines_come_as_they_are_found(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 1
    *_, cause, _, todo, untried, last = capsys.readouterr().out.splitlines()
    assert cause == "✕ agent         no agent runs with this home"
    assert "pmesh up" in todo
    assert untried.startswith("· not tried: versions, interfaces, firewall,")
    assert last == "1 cause found"
    del home


def test_a_home_that_is_not_there_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, first = call_doctor(capsys, "--home", str(home / "none"))
    assert (code, first["check"]) == (1, "home")
    assert f"there is no home directory {home / 'none'}" in first["found"]


def test_a_home_that_others_can_change_is_named(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.chmod(0o777)
    code, first = call_doctor(capsys)
    assert (code, first["check"]) == (1, "home")
    assert f"other users can change the files in {home}" in first["found"]


def test_a_key_given_by_a_variable_counts(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_key(home)
    monkeypatch.setenv("PMESH_KEY", KEY)
    assert call_doctor(capsys)[1]["check"] == "agent"
    monkeypatch.setenv("PMESH_KEY", "pmesh-aaaa")
    assert "PMESH_KEY is not a mesh key" in call_doctor(capsys)[1]["found"]


def test_a_port_that_another_program_holds_is_named_with_that_program(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with sockets.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("PMESH_LISTEN", f"127.0.0.1:{port}")
        code, first = call_doctor(capsys)
        assert (code, first["check"]) == (1, "port")
        assert f"port {port} is held by" in first["found"]
        assert f"pmesh up --listen 127.0.0.1:{port + 1}" in first["todo"]

        # An agent with this home that does not answer is no other program.
        pid = holder_of(port)
        if pid is not None:
            (home / "agent.lock").write_text(f"{pid}\n")
            assert call_doctor(capsys)[1]["check"] == "agent"


def test_an_address_that_this_machine_has_no_more_is_named(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMESH_LISTEN", "203.0.113.1:24160")
    code, first = call_doctor(capsys)
    assert (code, first["check"], first["verdict"]) == (1, "port", "cause")
    assert first["found"].startswith("can't listen at 203.0.113.1:24160: ")
    assert first["todo"] == "--listen must be an address of this machine"
    del home


def test_a_port_at_all_addresses_is_taken_if_it_is_at_one() -> None:
    with sockets.socket(sockets.AF_INET) as other:
        other.bind(("0.0.0.0", 0))  # noqa: S104 - as an agent does
        other.listen()
        port = other.getsockname()[1]
        assert not can_listen("", port)
        assert can_listen("203.0.113.1", port)  # which is not ours: another error
    assert can_listen("", port)


def test_a_machine_without_ipv6_can_listen(faults: Faults) -> None:
    def without_ipv6(
        real: Callable[..., sockets.socket], family: sockets.AddressFamily, kind: int
    ) -> sockets.socket:
        if family == sockets.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, kind)

    with sockets.socket() as other:
        other.bind(("0.0.0.0", 0))  # noqa: S104 - as an agent does
        port = other.getsockname()[1]
        other.listen()
        faults.around(sockets, "socket", without_ipv6)
        assert not can_listen("", port)
    assert can_listen("", port)


def test_who_holds_a_port_is_told_as_far_as_the_system_tells_it(faults: Faults) -> None:
    assert program_text(None) == ""
    assert program_text(2**22 + 1) == f"pid {2**22 + 1}"
    faults.fail(psutil, "net_connections", psutil.AccessDenied())
    assert holder_of(1) is None
    assert programs.listens_to_mdns(2**22 + 1)


def test_an_agent_that_ends_at_once_is_named(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_at(socket_path(home), lambda _: None):
        code, first = call_doctor(capsys)
    assert (code, first["check"]) == (1, "agent")
    assert "has ended" in first["found"]


def test_an_agent_of_another_protocol_is_named(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_at(socket_path(home), answer_with(protocol=PROTOCOL_VERSION - 1)):
        code, first = call_doctor(capsys)
    assert (code, first["check"]) == (1, "versions")
    assert first["todo"] == "pmesh down, and then pmesh up"


PARTICLE_MESH = """Metadata-Version: 2.1
Name: pmesh
Version: 0.1.56
Summary: Particle Mesh in Python
"""


def install(folder: Path, name: str, metadata: str, packages: str) -> None:
    info = folder / f"{name}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata)
    (info / "top_level.txt").write_text(packages)


def test_another_package_named_pmesh_is_named_with_its_folder(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    del home
    folder = tmp_path_factory.mktemp("site")
    install(folder, "pmesh-0.1.56", PARTICLE_MESH, "pmesh\n")
    monkeypatch.syspath_prepend(folder)
    code, first = call_doctor(capsys)
    assert (code, first["check"]) == (1, "packages")
    assert f"pmesh 0.1.56 in {folder}" in first["found"]
    assert "Particle Mesh in Python" in first["found"]
    assert "pip uninstall pmesh" in first["todo"]


def test_a_distribution_of_any_name_that_brings_the_package_is_found(tmp_path: Path) -> None:
    from importlib.metadata import distributions  # noqa: PLC0415 - beside its only use

    install(tmp_path, "a-1", "Name: mesher\nVersion: 1\n", "lib\npmesh\n")
    install(tmp_path, "b-1", "Name: other\nVersion: 1\n", "other\n")
    found = [*find_other_packages(distributions(path=[str(tmp_path)]))]
    assert [(each.name, each.summary) for each in found] == [("mesher", "")]


def test_a_package_whose_metadata_is_not_utf8_hides_no_other(tmp_path: Path) -> None:
    from importlib.metadata import distributions  # noqa: PLC0415 - beside its only use

    for name in ("a-1", "c-1"):
        install(tmp_path, name, "Name: x\nVersion: 1\n", "x\n")
        (tmp_path / f"{name}.dist-info" / "METADATA").write_bytes(b"Name: x\nAuthor: J\xfcrgen\n")
    install(tmp_path, "b-1", "Name: mesher\nVersion: 1\n", "pmesh\n")
    found = [*find_other_packages(distributions(path=[str(tmp_path)]))]
    assert [each.name for each in found] == ["mesher"]


def test_the_package_that_is_installed_here_is_not_another_one() -> None:
    assert [*find_other_packages()] == []
