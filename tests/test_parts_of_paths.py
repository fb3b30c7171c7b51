"""Nothing that another sends becomes part of a path, unless it is a `PathName`.

All places that make a path are found here. One with a part that is neither in the source nor made
by `path_name` fails until it stands in the list below, with the reason why nobody else can choose
that part, or why somebody may.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmesh.ids import path_name

ROOT = Path(__file__).parents[1]
PART = {  # from which argument on they become part of a path
    **dict.fromkeys(["Path", "PurePath", "joinpath", "with_name", "with_stem", "with_suffix"], 0),
    **dict.fromkeys(["glob", "rglob", "rmtree"], 0),
    "remove_tree": 1,
}
WITHIN = {"dir_fd", "src_dir_fd", "within"}  # arguments that say below what the first one lies

KNOWN = {
    # The configuration, the command line and the environment of this machine's own user.
    "pmesh/agent/config.py": {
        "Path(value if isinstance(value, Path) else _text(value))",
        "base / parsed",
    },
    "pmesh/launches/cli/launch.py": {
        "Path(os.path.abspath(cwd))",
        "Path(program)",
        "Path(script)",
        "Path(word)",
        "cwd / expand_user(Path(script))",
        "cwd / expand_user(Path(word))",
        "cwd / found",
    },
    "pmesh/agent/home.py": {"self._path.with_name(f'{self._path.name}.1')"},  # ours
    "pmesh/notebook.py": {"Path(folder, 'cell.py')"},
    "pmesh/cli/service.py": {
        "Path(os.environ.get('PMESH_HOME') or Path(user.pw_dir, '.pmesh'))",
        "Path(user.pw_dir)",
        "Path(user.pw_dir, '.pmesh')",
    },
    "pmesh/cli/bugreport.py": {"Path(f'pmesh-bugreport-{now:%Y%m%d-%H%M%S}.txt')"},
    "pmesh/cli/demo.py": {
        "Path(made, f'mac-{number}')",  # counted here
        "home.parent / f'{name}.log'",  # our own names of programs
    },
    "pmesh/cli/demo_training.py": {
        "Path(sysconfig.get_path('stdlib'))",
        "STEPS / seconds",
        "chances / len(starts)",
    },
    "pmesh/cli/mlx.py": {
        "Path(first)",
        "Path(path)",
        "Path(program.target)",
        "Path(python)",
        "Path(self.target)",
        "Path(sys.executable)",
        "Path(value)",
    },
    "pmesh/launches/cli/run.py": {"Path(name, 'connects')", "Path(script)"},  # a new directory
    "pmesh/launches/cli/same_code.py": {
        "Path(file)",
        "Path(name)",
        "cwd / f'{path}.py'",
        "cwd / name",
        "cwd / named",
        "cwd / script",
        "cwd.joinpath(*parts[:depth])",
    },
    "pmesh/cli/init.py": {
        "Path(__file__)",
        "_PACKAGE / 'cli' / 'examples' / name",
        "_PACKAGE.parent / 'examples' / name",
    },
    "pmesh/cli/plot.py": {
        "Path(f'pmesh-plot-{_UNUSUAL.sub('_', name)}.png')",
        "Path(what)",
    },
    "pmesh/cli/trace.py": {
        "100 * part / whole_us",
        "Path(f'pmesh-trace-{_UNUSUAL.sub('_', job)}.json.gz')",
    },
    "pmesh/client/checkpoints/checkpoints.py": {"Path(folder)"},
    "pmesh/client/elastic/place.py": {"Path(mark)"},  # the user's own environment names it
    "pmesh/client/connect.py": {
        "Path(sys.argv[0] if sys.argv and sys.argv[0] else sys.executable)",
    },
    "pmesh/mlx_lm/session.py": {"Path(options.adapter_path)"},
    "pmesh/testing.py": {"Path(home)"},
    "pmesh/torch/lightning.py": {
        "Path(str(found))"
    },  # as Lightning broadcasts it; nothing opens it
    "pmesh/torch/options.py": {"Path(sys.argv[0] if sys.argv and sys.argv[0] else 'torch')"},
    # Directories as this machine lists them, and git, whose answer `flaw_of` checks.
    "pmesh/launches/cli/sync.py": {
        "Path(directory)",
        "Path(name)",
        "cwd / name",
        "here / name",
        "root / directory",
        "root / entry.path",
        "root / inner",
        "root / path",
    },
    "pmesh/net/links/hardware.py": {"_SYS_CLASS_NET / interface", "host / name"},
    # Beside the source.
    "pmesh/native/__init__.py": {
        "Path(__file__)",
        "Path(__file__).with_name('libpmesh.dylib' if sys.platform == 'darwin' else 'libpmesh.so')",
    },
    # Numbers.
    "pmesh/cli/bench.py": {"nbytes / median_s", "seconds / max(min(warm), 1e-09)"},
    "pmesh/mlx_lm/state.py": {
        "folder / f'{self.iteration:07d}_{ADAPTERS}'",
        "path.with_name(f'.{path.stem}.{secrets.token_hex(4)}{path.suffix}')",
    },
    "pmesh/mlx_lm/training.py": {
        "float(tokens) / seconds",
        "loss / max(tokens, 1)",
        "loss / targets",
        "since.iterations / seconds",
        "total / max(targets, 1)",
    },
    "pmesh/net/sessions/processes.py": {"now / period_s"},
    "pmesh/launches/agent/spool.py": {
        "directory / f'{start:020}.lines'",
        "remove_tree(self.directory.parent, self.directory.name)",
    },
    # A `PathName` and numbers; and what was listed in the folder itself.
    "pmesh/client/checkpoints/files.py": {
        "folder / manifest.key.folder",
        "folder / manifest.key.folder / own_name(manifest.rank, len(manifest.names))",
        "folder / manifest.key.folder / part_name(part, len(manifest.names))",
        "folder / name",
        "open_directory(name, within=parent)",
        "os.mkdir(name, dir_fd=parent)",
        "os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 420, dir_fd=here)",
        "os.replace(new, name, src_dir_fd=here, dst_dir_fd=here)",
        "os.rmdir(name, dir_fd=parent)",
        "os.unlink(name, dir_fd=descriptor)",
        "os.unlink(name, dir_fd=self._descriptor)",
        "os.unlink(new, dir_fd=here)",
        "path.parent / part_name(part, size)",
        "remove_tree(folder, save.name)",
    },
    "pmesh/launches/agent/here.py": {"remove_tree(self._files.parent, self._files.name)"},
    # The names of a tree, which has no flaw; one at a time, below a directory that is open.
    "pmesh/launches/agent/copies.py": {
        "Path(tempfile.mkdtemp(dir=path.parent, prefix=_BUILDING))",
        "copy.parent.with_name(_RECORDS) / copy.name",
        "os.mkdir(name, dir_fd=here)",
        "os.open(name, A_DIRECTORY, dir_fd=here)",
        "os.symlink(target, name, dir_fd=here)",
        "remove_tree(path.parent, building.name)",
        "remove_tree(self._directory, path.name)",
        "self._store.copy_out(content, name, within=here, executable=executable)",
    },
    # The names in a copy, as this machine lists them: below a directory that is open.
    "pmesh/launches/agent/fetching.py": {
        "os.open(name, _READ, dir_fd=here)",
        "os.stat(name, dir_fd=here, follow_symlinks=False)",
        "store.add_file(name, within=here)",
    },
    # The hash of a content in hexadecimal; a temporary file; and what is read, here or in a copy.
    "pmesh/launches/agent/files.py": {
        "Path(name)",
        "os.open(path, flags, dir_fd=within)",
        "os.open(name, flags, mode, dir_fd=within)",
        "self._directory / text[:2]",
        "self._directory / text[:2] / text[2:]",
    },
    # What a member asks for that may run commands here: it may name any file.
    "pmesh/launches/agent/checks.py": {
        "Path(command.cwd)",
        "Path(path)",
        "Path(word)",
        "cwd / Path(path).expanduser()",
        "cwd / Path(word).expanduser()",
        "cwd / found",
        "cwd / wanted.path",
    },
    # The functions that are called with the above.
    "pmesh/home_paths.py": {
        "Path(chosen)",
        "Path(copy)",
        "SYSTEM_TEMPORARY / f'pmesh-{os.getuid()}'",
        "_private_directory() / f'{name}.sock'",
        "directory / name",
        "os.open(path, A_DIRECTORY, dir_fd=within)",
        "path.parent.resolve() / path.name",
        "shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)",
    },
}


def paths_made(source: str) -> Iterator[str]:
    """What makes a path of more than the source says; also a division where paths are imported."""
    tree = ast.parse(source)
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (getattr(node, "module", None), *(alias.name for alias in node.names))
    }
    for node in ast.walk(tree) if imported & {"os", "pathlib"} else ():
        match node:
            case ast.BinOp(op=ast.Div(), right=part):
                parts = [part]
            case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name), args=args) if (
                name in PART
            ):
                parts = args[PART[name] :]
            case ast.Call(args=[part, *_], keywords=named) if WITHIN.intersection(
                str(keyword.arg) for keyword in named
            ):
                parts = [part]
            case _:
                continue
        if not all(map(is_fixed, parts)):
            yield ast.unparse(node).replace('"', "'")  # of which Python 3.12 writes others


def is_fixed(part: ast.expr) -> bool:
    """Whether the source says what it is, or `path_name` has checked it."""
    match part:
        case ast.Constant() | ast.Call(func=ast.Name("path_name")):
            return True
        case ast.Name(name) | ast.Attribute(attr=name):
            return name.isupper()
        case ast.JoinedStr(values=pieces):
            return all(map(is_fixed, pieces))
        case ast.FormattedValue(value=value):
            return is_fixed(value)
        case _:
            return False


def test_each_part_of_a_path_is_known_and_nobody_else_chooses_it() -> None:
    """What is new: give path_name() what others could choose, or say why nobody else can."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / "pmesh").rglob("*.py")):
        made = set(paths_made(file.read_text(encoding="utf-8")))
        if made:
            found[file.relative_to(ROOT).as_posix()] = made
    assert found == KNOWN


@pytest.mark.parametrize(
    "new",
    [
        "home / message.launch",
        "home / f'{launch}.log'",
        "home.joinpath('x', name)",
        "Path(save_id)",
        "path.with_name(machine.name)",
        "os.unlink(name, dir_fd=folder)",
        "shutil.rmtree(save)",
        "remove_tree(folder, name)",
    ],
)
def test_a_new_place_is_found(new: str) -> None:
    assert new in paths_made(f"import os\nimport pathlib\n{new}")


def test_what_the_source_says_and_what_was_checked_is_no_new_place() -> None:
    fine = (
        "home / 'launches' / LOG_NAME / path_name(launch)\nPath('x')\nremove_tree(home, 'launches')"
    )
    assert list(paths_made(f"from pathlib import Path\n{fine}")) == []


@pytest.mark.parametrize("text", ["", ".", "..", "a/b", "a\0", "a.b", "A", "é", "a\n", "a" * 65])
def test_what_could_lead_elsewhere_is_no_part_of_a_path(text: str) -> None:
    with pytest.raises(ValueError, match="not a name that may be part of a path"):
        path_name(text)
