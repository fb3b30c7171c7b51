"""`pmesh man`: the manual page, made of what `--help` says."""

import datetime as dt
import inspect
import re
from collections.abc import Iterator
from typing import Final

from cyclopts import App

from pmesh.installed import installed_version

_INSTRUCTION: Final = re.compile(r"^([.'])", re.MULTILINE)


def manual_page(app: App) -> str:
    r"""Return it as input of `man`: macros of man(7), for all commands in their order of use."""
    date = dt.datetime.now(dt.UTC).date()
    lines = [
        f'.TH PMESH 1 "{date}" "pmesh {installed_version()}" "User Commands"',
        ".SH NAME",
        f"pmesh \\- {_text(app.help or '')}",
        ".SH SYNOPSIS",
        ".B pmesh",
        "\\fICOMMAND\\fR [\\fIOPTION\\fR ...]",
        ".SH COMMANDS",
    ]
    for name, command in _commands(app, "pmesh"):
        lines += _about(name, command)
    lines += [
        ".SH EXIT STATUS",
        "0 if all went well, 1 if something failed, 2 if it was used wrongly, 130 after Ctrl\\-C.",
        ".SH SEE ALSO",
        _text("docs/reference/command-line.md has more on each command, on settings and files."),
    ]
    return "\n".join(lines) + "\n"


def _commands(app: App, prefix: str) -> Iterator[tuple[str, App]]:
    names = [name for name in app if not name.startswith("-")]
    for name in sorted(names, key=lambda each: (app[each].sort_key or 0, each)):
        inner = list(_commands(app[name], f"{prefix} {name}"))
        yield from inner or [(f"{prefix} {name}", app[name])]


def _about(name: str, command: App) -> Iterator[str]:
    yield f".SS {_text(name)}"
    description, _, _ = inspect.cleandoc(command.help or "").partition("Args:")
    yield _text(description.strip())
    for argument in command.assemble_argument_collection(parse_docstring=True):
        yield ".TP"
        yield f".B {_text(', '.join(argument.names))}"
        yield _text(argument.parameter.help or "")


def _text(text: str) -> str:
    """As roff shows it: no character is an instruction."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return _INSTRUCTION.sub(r"\\&\1", escaped)
