"""Settings: four layers, and errors that name where a bad value stands."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmesh.agent.config import (
    AgentSettings,
    Listen,
    as_environment,
    load_settings,
)
from pmesh.agent.host_port import DEFAULT_PORT, host_port_text, parse_host_port
from pmesh.compression.schemes import NAMES
from pmesh.core.wire.link import Address
from pmesh.errors import ConfigError


def load(
    home: Path,
    *,
    file: str | None = None,
    environment: dict[str, str] | None = None,
    host_name: str = "mac-1.local",
    **flags: object,
) -> AgentSettings:
    if file is not None:
        (home / "config.toml").write_text(file)
    return load_settings(home, flags=flags, environment=environment or {}, host_name=host_name)


def test_defaults_come_from_the_design(tmp_path: Path) -> None:
    assert load(tmp_path) == AgentSettings(home=tmp_path, name="mac-1", listen=Listen("", 24160))


@pytest.mark.parametrize(
    ("host_name", "name"),
    [
        ("", "unnamed"),
        ("bad\x1bname", "unnamed"),
        ("\udcffmac", "?mac"),
        ("é" * 40, "é" * 31),
        ("a.b.c", "a"),
    ],
)
def test_any_host_name_gives_a_name(tmp_path: Path, host_name: str, name: str) -> None:
    assert load(tmp_path, host_name=host_name).name == name


def test_flags_win_over_variables_over_the_file(tmp_path: Path) -> None:
    file = 'name = "file"\nmin_peers = 1\nlog_level = "error"\n'
    environment = {"PMESH_NAME": "variable", "PMESH_MIN_PEERS": "2", "PMESH_LISTEN": ""}
    settings = load(tmp_path, file=file, environment=environment, name="flag", listen=None)
    assert (settings.name, settings.min_peers, settings.log_level) == ("flag", 2, "error")
    assert settings.listen == Listen()


def test_settings_need_no_working_directory_and_no_user_of_a_key_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert load(tmp_path, environment={"PMESH_MDNS": "0"}, name="flag").name == "flag"
    with pytest.raises(ConfigError, match="knows no home directory of ~no-one; write the whole"):
        load(tmp_path, key_file="~no-one/key")


def test_every_setting_can_stand_in_the_file(tmp_path: Path) -> None:
    file = (
        'name = "studio"\nlisten = "127.0.0.1:0"\npeers = ["a:1", "[::1]:2"]\nmdns = false\n'
        'interfaces = ["en5"]\nnot_interfaces = ["en0", "utun4"]\n'
        'min_peers = 3\ncompression = "int8"\n'
        'log_level = "debug"\nlog_json = true\nkey_file = "the.key"\n'
    )
    assert load(tmp_path, file=file) == AgentSettings(
        home=tmp_path,
        name="studio",
        listen=Listen("127.0.0.1", 0),
        peers=(Address("a", 1), Address("::1", 2)),
        interfaces=("en5",),
        not_interfaces=("en0", "utun4"),
        mdns=False,
        min_peers=3,
        compression="int8",
        log_level="debug",
        log_json=True,
        key_file=tmp_path / "the.key",
    )


def test_a_path_outside_the_file_is_meant_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(tmp_path / "home", key_file=Path("k")).key_file == tmp_path / "k"


@pytest.mark.parametrize(
    ("key", "hint"), [("peer", "did you mean 'peers'"), ("xyzzy", "it may hold name, listen")]
)
def test_an_unknown_key_is_named_with_its_file(tmp_path: Path, key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key '{key}' in .*config.toml; {hint}"):
        load(tmp_path, file=f"{key} = 1")


def test_a_file_that_is_not_toml_is_named_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.toml is not TOML: .*line 2"):
        load(tmp_path, file="mdns = true\nname = \n")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(ConfigError, match=r"can't read .*config.toml"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", ""),
        ("name", "a\x1bb"),
        ("name", "n" * 64),
        ("name", 5),
        ("listen", "::1"),
        ("listen", "mac..1:80"),
        ("listen", "[::1"),
        ("listen", "[::1]24160"),
        ("listen", "host:65536"),
        ("listen", "host:²"),
        ("listen", "my host:1"),
        ("peers", ["host:0"]),
        ("peers", [":24160"]),
        ("peers", [1]),
        ("peers", 1),
        ("interfaces", 1),
        ("not_interfaces", [1]),
        ("mdns", "maybe"),
        ("mdns", 2),
        ("min_peers", -1),
        ("min_peers", "many"),
        ("min_peers", True),
        ("compression", "gzip"),
        ("compression", 8),
        ("log_level", "loud"),
        ("key_file", 1),
        ("key_file", ""),
        ("key_file", "a\x00b"),
    ],
)
def test_a_bad_value_names_its_source(tmp_path: Path, key: str, value: object) -> None:
    special = {
        "peers": "--peer",
        "mdns": "--no-mdns",
        "interfaces": "--interface",
        "not_interfaces": "--not-interface",
    }
    flag = special.get(key, f"--{key.replace('_', '-')}")
    with pytest.raises(ConfigError, match=f"^{flag} = "):
        load_settings(tmp_path, flags={key: value}, environment={}, host_name="x")


def test_a_bad_variable_and_a_bad_line_name_their_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^PMESH_MDNS = 'perhaps': must be true or false"):
        load(tmp_path, environment={"PMESH_MDNS": "perhaps"})
    with pytest.raises(ConfigError, match=r"^min_peers in .*config.toml = 'x'"):
        load(tmp_path, file='min_peers = "x"')


def test_the_mesh_key_is_taken_from_the_flag_then_pmesh_key_then_other_files(
    tmp_path: Path,
) -> None:
    both = {"PMESH_KEY": "pmesh-secret", "PMESH_KEY_FILE": "/k"}
    from_variable = load(tmp_path, environment=both)
    assert (from_variable.key_text, from_variable.key_file) == ("pmesh-secret", None)
    from_flag = load(tmp_path, environment=both, key_file="/flag")
    assert (from_flag.key_text, from_flag.key_file) == (None, Path("/flag"))
    assert "secret" not in repr(from_variable)


@pytest.mark.parametrize("given", ["none", "None", " "])
def test_compression_may_be_named_none(tmp_path: Path, given: str) -> None:
    file = 'compression = "int8"\n'
    assert load(tmp_path, file=file).compression == "int8"
    assert load(tmp_path, file=file, compression=given).compression == ""


hosts = st.sampled_from(["a", "10.0.0.1", "::1", "fe80::1%en0", "mac-1.local"])
names = st.text(min_size=1, max_size=15).filter(
    lambda text: text.isprintable() and text.strip() == text
)


@given(
    settings=st.builds(
        AgentSettings,
        home=st.just(Path("/home")),
        name=names,
        listen=st.builds(Listen, hosts | st.just(""), st.integers(0, 65535)),
        peers=st.lists(st.builds(Address, hosts, st.integers(1, 65535))).map(tuple),
        interfaces=st.lists(st.sampled_from(["en0", "eth0.7"])).map(tuple),
        not_interfaces=st.lists(st.sampled_from(["utun4"])).map(tuple),
        mdns=st.booleans(),
        min_peers=st.integers(0, 10**6),
        compression=st.sampled_from(["", *NAMES]),
        log_level=st.sampled_from(["debug", "info", "warning", "error"]),
        log_json=st.booleans(),
        key_file=st.none() | st.just(Path("/k")),
        key_text=st.none(),
    )
)
def test_a_detached_agent_gets_the_same_settings(settings: AgentSettings) -> None:
    environment = as_environment(settings)
    again = load_settings(Path("/home"), flags={}, environment=environment, host_name="x")
    assert again == settings


def test_a_detached_agent_gets_the_key_that_was_chosen(tmp_path: Path) -> None:
    settings = load(tmp_path, environment={"PMESH_KEY": "k"})
    assert as_environment(settings)["PMESH_KEY"] == "k"
    assert "PMESH_KEY" not in as_environment(load(tmp_path))


def test_a_detached_agent_takes_nothing_else_from_the_file(tmp_path: Path) -> None:
    here = 'compression = "int8"\npeers = ["mac-2"]\n'
    file = f'{here}interfaces = ["en0"]\nnot_interfaces = ["en1"]\n'
    settings = load(
        tmp_path, file=file, compression="none", peers=(), interfaces=(), not_interfaces=()
    )
    assert (settings.compression, settings.peers, settings.interfaces) == ("", (), ())
    assert load(tmp_path, environment=as_environment(settings), host_name="x") == settings


@given(hosts, st.integers(0, 65535))
def test_host_and_port_survive_their_text(host: str, port: int) -> None:
    assert parse_host_port(host_port_text(host, port)) == (host, port)


@given(st.text())
def test_any_text_is_a_host_and_port_or_a_value_error(text: str) -> None:
    try:
        _, port = parse_host_port(text)
    except ValueError:
        return
    assert 0 <= port <= 65535


def test_a_port_alone_is_not_taken_for_a_host() -> None:
    with pytest.raises(ValueError, match="a port without a host is written :24164"):
        parse_host_port("24164")


@pytest.mark.parametrize("host", ["a..b", ".local", f"{'a' * 64}.local", "é" * 64])
def test_a_name_that_can_not_be_looked_up_is_no_host(host: str) -> None:
    with pytest.raises(ValueError, match="each part between dots has 1 to 63 letters"):
        parse_host_port(f"{host}:7000")


def test_a_host_alone_has_the_default_port() -> None:
    assert parse_host_port("studio") == ("studio", DEFAULT_PORT)
