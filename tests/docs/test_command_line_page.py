import shlex
from pathlib import Path

import cyclopts
import pytest

from pmesh.agent.config import PARSERS, AgentSettings, variable_of
from pmesh.agent.host_port import DEFAULT_PORT
from pmesh.cli.app import FAILED, INTERRUPTED, MISUSED, app
from pmesh.cli.launching import end_own_options
from tests.docs.pages import DOCS, PAGES, ROOT, code_in, read, sections, shown_commands, table_rows

PAGE = sections(read(DOCS / "reference" / "command-line.md"))


def commands(of: cyclopts.App, prefix: str = "pmesh") -> dict[str, cyclopts.App]:
    """Every command by what a user types."""
    found: dict[str, cyclopts.App] = {}
    for name in of:
        if not name.startswith("-"):
            inner = commands(of[name], f"{prefix} {name}")
            found |= inner or {f"{prefix} {name}": of[name]}
    return found


def options(command: cyclopts.App) -> set[str]:
    arguments = command.assemble_argument_collection()
    return {name for argument in arguments for name in argument.names if name.startswith("--")}


def test_the_page_has_a_section_for_every_command_and_no_other() -> None:
    assert {heading for heading in PAGE if heading.startswith("pmesh ")} == set(commands(app))


@pytest.mark.parametrize("command", commands(app))
def test_the_page_has_a_row_for_every_option_and_no_other(command: str) -> None:
    rows = table_rows(PAGE[command])
    documented = {option.split()[0] for row in rows for option in code_in(row[0])}

    assert documented == options(commands(app)[command])


def test_every_setting_has_its_key_variable_and_option() -> None:
    rows = [row for row in table_rows(PAGE["Settings"]) if len(row) == 4]

    assert [code_in(row[0])[0] for row in rows] == list(PARSERS)
    for key, _, variable, option in rows:
        (name,) = code_in(key)
        assert code_in(variable)[0] == variable_of(name)
        assert set(code_in(option)) <= options(app["up"])


def test_the_defaults_on_the_page_are_those_of_the_program() -> None:
    settings = AgentSettings(home=ROOT, name="mac-1")
    rows = {code_in(row[0])[0].split()[0]: row[1] for row in table_rows(PAGE["pmesh up"])}

    assert f"Default: all addresses, port {DEFAULT_PORT}." in rows["--listen"]
    assert settings.listen == ("", DEFAULT_PORT)
    assert f"Default: {settings.min_peers}." in rows["--min-peers"]
    assert f"Default: `{settings.log_level}`." in rows["--log-level"]
    assert "Default: look." in rows["--mdns"]
    assert settings.mdns
    assert "Default: text." in rows["--log-json"]
    assert not settings.log_json


def test_the_exit_codes_on_the_page_are_those_of_the_program() -> None:
    codes = [int(row[0]) for row in table_rows(PAGE["Exit codes"])]

    assert codes == [0, FAILED, MISUSED, INTERRUPTED]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_shown_can_be_typed(path: Path) -> None:
    for command in shown_commands(read(path)):
        words = shlex.split(command.replace("…", ""))[1:]
        app.parse_args(end_own_options(words), exit_on_error=False, print_error=False)


def test_commands_are_found_where_the_pages_show_them() -> None:
    shown = [command for path in PAGES for command in shown_commands(read(path))]

    assert "pmesh up" in shown
    assert "pmesh up --peer mac-1.local" in shown
    assert "pmesh key show --home ~/.pmesh-a" in shown
    assert len(shown) > 20
