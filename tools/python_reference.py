"""Write docs/reference/python.md anew, after a change of a public docstring or signature.

It is plain Markdown, so that it can be read where nobody has built the documentation.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pmesh
import pmesh.errors
import pmesh.mlx

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference" / "python.md"
THINGS: Final[tuple[tuple[str, Any], ...]] = (
    ("pmesh.connect", pmesh.connect),
    ("pmesh.Mesh", pmesh.Mesh),
    ("pmesh.Group", pmesh.Group),
    ("pmesh.DeviceMesh", pmesh.DeviceMesh),
    ("pmesh.Handle", pmesh.Handle),
    ("pmesh.LastOp", pmesh.LastOp),
    ("pmesh.Compared", pmesh.Compared),
    ("pmesh.Store", pmesh.Store),
    ("pmesh.Rpc", pmesh.Rpc),
    ("pmesh.RemoteCall", pmesh.RemoteCall),
    ("pmesh.RemoteObject", pmesh.RemoteObject),
    ("pmesh.Checkpoints", pmesh.Checkpoints),
    ("pmesh.Shard", pmesh.Shard),
    ("pmesh.LocalUpdates", pmesh.LocalUpdates),
    ("pmesh.Nesterov", pmesh.Nesterov),
    ("pmesh.mlx.ShardedOptimizer", pmesh.mlx.ShardedOptimizer),
    ("pmesh.mlx.fully_shard", pmesh.mlx.fully_shard),
    ("pmesh.mlx.FullySharded", pmesh.mlx.FullySharded),
    ("pmesh.mlx.Block", pmesh.mlx.Block),
    ("pmesh.mlx.language_model_blocks", pmesh.mlx.language_model_blocks),
    ("pmesh.mlx.split_layers", pmesh.mlx.split_layers),
    ("pmesh.mlx.Pipeline", pmesh.mlx.Pipeline),
    ("pmesh.mlx.ElasticPipeline", pmesh.mlx.ElasticPipeline),
    ("pmesh.mlx.PipelineReport", pmesh.mlx.PipelineReport),
    ("pmesh.mlx.SyncBatchNorm", pmesh.mlx.SyncBatchNorm),
    ("pmesh.errors.PmeshError", pmesh.errors.PmeshError),
)
MADE_BY_CALLS: Final = frozenset(
    {
        *("Mesh", "Group", "Handle", "LastOp", "Compared", "Store", "FullySharded"),
        *("Rpc", "RemoteCall", "RemoteObject"),
    }
)
"""Classes that a script does not make itself."""
INTRODUCTION: Final = """\
# Python: each call

Every public class and function with its docstring; [Python](client.md) explains them by subject.
`python tools/python_reference.py` writes this page, and a test compares it with the code.
"""


def write_page() -> str:
    """Return the page."""
    names = "\n".join(f"- [`{name}`](#{anchor(name)})" for name, _ in THINGS)
    parts = (part for name, thing in THINGS for part in describe(name, thing))
    return "\n".join([INTRODUCTION, names, "", *parts])


def anchor(name: str) -> str:
    """Return what a heading of this name is linked by.

    >>> anchor("pmesh.mlx.fully_shard")
    'pmeshmlxfully_shard'
    """
    return name.replace(".", "").lower()


def describe(name: str, thing: Any) -> Iterator[str]:  # noqa: ANN401 - a class or a function
    """Yield a function, or a class with its public members, those of its mixins too."""
    yield f"## `{name}`\n"
    is_class = inspect.isclass(thing)
    if not (is_class and thing.__name__ in MADE_BY_CALLS | {"PmeshError"}):
        yield as_text(f"{name}{parameters(thing)}")
    yield as_text(inspect.getdoc(thing) or "")
    if is_class:
        for member in public_members(thing):
            yield from describe_member(thing, member)


def public_members(thing: type) -> list[str]:
    """Return the names in the order of the source, a class before those it builds on."""
    found = dict.fromkeys(
        name
        for base in thing.__mro__
        if base.__module__.startswith("pmesh")
        for name, value in vars(base).items()
        if not name.startswith("_") and inspect.getdoc(value) and is_shown(value)
    )
    of_mesh = {name for base in pmesh.Mesh.__mro__ for name in vars(base)}
    return [name for name in found if thing is not pmesh.Group or name not in of_mesh]


def is_shown(value: object) -> bool:
    return isinstance(value, property) or inspect.isfunction(value)


def describe_member(thing: type, name: str) -> Iterator[str]:
    """Yield a property or a method."""
    value = inspect.getattr_static(thing, name)
    call = "" if isinstance(value, property) else parameters(value)
    yield f"### `{thing.__name__}.{name}`\n"
    yield as_text(f"{name}{call}\n\n{inspect.getdoc(value)}")


def parameters(thing: Any) -> str:  # noqa: ANN401 - a class or a function
    """Return the parameters with their defaults, without types: the docstring has them."""
    signature = inspect.signature(thing)
    kept = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    return str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))


def as_text(text: str) -> str:
    return f"```text\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
    print(f"wrote {PAGE}")
