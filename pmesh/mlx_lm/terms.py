"""Checks what must be the same on all machines of a run, and what a saved state must match.

Paths differ between machines, so models and data sets are compared by their contents.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash

from pmesh.errors import UsageError
from pmesh.mlx_lm.libraries import mx, trees

RunTerms = dict[str, str]
"""A text for each option, and for the model and each data set."""

# Paths, and options that concern only one machine.
_LOCAL = frozenset(
    {
        *("adapter_path", "clear_cache_threshold", "config", "data", "model", "project_name"),
        *("report_to", "resume_adapter_file", "train", "trust_remote_code"),
    }
)
_SAMPLED = 64  # values of each array: enough to tell weights apart, and reading all would take long

MODEL = "base model"
OF_A_STATE = (MODEL, "--fine-tune-type", "--num-layers", "--lora-parameters", "--optimizer")
"""Terms that a saved state must match; other options may change when a run resumes."""


class LoadedRows(Protocol):
    """A data set as it was loaded."""

    def __getitem__(self, idx: int) -> object: ...
    def __len__(self) -> int: ...


def option_terms(options: Mapping[str, Any]) -> RunTerms:
    """Return the options that all machines must share.

    >>> option_terms({"batch_size": 4, "model": "/Users/ann/llama"})
    {'--batch-size': '4'}
    """
    return {
        "--" + name.replace("_", "-"): str(value)
        for name, value in sorted(options.items())
        if name not in _LOCAL
    }


def describe_rows(rows: LoadedRows) -> str:
    """Return the number of rows, and a hash of all of them."""
    hasher = xxhash.xxh3_64()
    for row in range(len(rows)):
        hasher.update(repr(rows[row]).encode(errors="surrogatepass"))
    return f"{len(rows)} rows, hash {hasher.hexdigest()}"


def describe_model(model: Any) -> str:
    """Return a hash of the frozen parameters: names, shapes, dtypes and some of the values."""
    trained = dict(trees.tree_flatten(model.trainable_parameters()))
    frozen = [(k, x) for k, x in trees.tree_flatten(model.parameters()) if k not in trained]
    samples = [x.reshape(-1)[:: max(1, x.size // _SAMPLED)].view(mx.uint8) for _, x in frozen]
    mx.eval(samples)
    hasher = xxhash.xxh3_64()
    for (name, x), sample in zip(frozen, samples, strict=True):
        hasher.update(f"{name} {x.shape} {x.dtype}".encode())
        hasher.update(np.array(sample).tobytes())
    shape = " by ".join(str(x) for x in frozen[0][1].shape) if frozen else "no parameters"
    return f"{len(frozen)} frozen arrays, the first of {shape}, hash {hasher.hexdigest()}"


def check_alike(names: Sequence[str], terms: Sequence[RunTerms]) -> None:
    """Compare the terms of machines with those of the first.

    Raises:
        UsageError: Some terms differ; the message names them with both values.
    """
    for name, other in zip(names[1:], terms[1:], strict=True):
        if differences := _differences(terms[0], other):
            shown = "; ".join(
                f"{what} is {one} on {names[0]} and {another} on {name}"
                for what, one, another in differences
            )
            raise UsageError(f"{shown}: give the same options, model and data on all machines")


def check_resumable(path: object, saved: RunTerms, terms: RunTerms) -> None:
    """Compare the terms of a saved state with those of this run.

    Raises:
        UsageError: It is from another model, or from another kind of fine-tuning.
    """
    ours, theirs = ({k: x.get(k, "nothing") for k in OF_A_STATE} for x in (terms, saved))
    if differences := _differences(theirs, ours):
        shown = "; ".join(f"{what} was {one}, and is {now} here" for what, one, now in differences)
        raise UsageError(
            f"{path} has the state of another run: {shown}; give the options and the model of that "
            "run, another --adapter-path, or --no-resume to begin anew and replace it"
        )


def _differences(one: RunTerms, other: RunTerms) -> list[tuple[str, str, str]]:
    names = [*one, *(name for name in other if name not in one)]
    pairs = [(name, one.get(name, "not given"), other.get(name, "not given")) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]
