"""What local updates do to a training: a character transformer on the standard library's sources.

Four ranks train as threads of one process, which make the calls that a user's script makes. Each
line that is printed is one run: the loss is that of text that no rank has seen, in nats for each
character. All runs with one seed begin with the same weights and draw the same samples. With
`--together-first` they begin with weights that were trained synchronously, as in the papers; then
the rate falls to 0.

The lines of several runs, in one file, are summed up with `--report`.
"""

import copy
import importlib
import json
import math
import statistics
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import numpy as np

import pmesh
from pmesh.testing import SimulatedMesh

torch: Any = importlib.import_module("torch")  # optional, so it has no types here

RANKS = 4
CONTEXT = 32  # characters
WIDTH, HEADS, LAYERS = 144, 4, 4
ALPHABET = 128  # ASCII; what is not in it is read as a question mark
WARM_UP = 0.05  # of the steps, in which the learning rate rises
HELD_OUT = 10  # every tenth file
MEASURED_WINDOWS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How is trained."""

    seed: int = 1
    steps: int = 1000
    batch: int = 4
    """Windows of each rank in a step."""
    rate: float = 2e-3
    together_first: int = 0
    """Synchronous steps before `steps`."""
    first_rate: float = 2e-3
    """Of these steps."""
    inner_steps: Annotated[tuple[int, ...], cyclopts.Parameter(consume_multiple=True)] = (1,)
    """Of each training; 1: synchronous."""
    compression: str | None = None
    fragments: int = 1
    delayed: bool = False
    nesterov: tuple[float, float] | None = None
    """The outer rate and momentum."""


def read_text() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """All modules that lie directly in the standard library: to train with, and held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [
        np.frombuffer(f.read_text("ascii", "replace").encode("ascii", "replace"), np.uint8)
        for f in files
    ]
    held = texts[::HELD_OUT]
    rest = [text for i, text in enumerate(texts) if i % HELD_OUT]
    return np.concatenate(rest), np.concatenate(held)


def make_net() -> Any:
    """The parts of a decoder of characters with 1.0 million parameters."""
    nn = torch.nn
    layers = (
        nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(LAYERS)
    )
    return nn.ModuleDict(
        {
            "characters": nn.Embedding(ALPHABET, WIDTH),
            "places": nn.Embedding(CONTEXT, WIDTH),
            "layers": nn.ModuleList(layers),
            "norm": nn.LayerNorm(WIDTH),
            "out": nn.Linear(WIDTH, ALPHABET),
        }
    )


def loss_of(net: Any, windows: Any) -> Any:
    """The mean cross-entropy of windows of one character more than the context."""
    mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT)
    x = net["characters"](windows[:, :-1]) + net["places"].weight
    for layer in net["layers"]:
        x = layer(x, src_mask=mask, is_causal=True)
    logits = net["out"](net["norm"](x))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def windows_of(text: np.ndarray[Any, Any], count: int, seed: list[int]) -> Any:
    """So many windows of the text at random places."""
    starts = np.random.default_rng(seed).integers(0, len(text) - CONTEXT - 1, count)
    return torch.from_numpy(text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int64))


def rate_at(step: int, options: Recipe) -> float:
    """A rise, then half a cosine down to a tenth; after synchronous steps a line down to 0."""
    first: int = options.together_first
    if step < first:
        return float(options.first_rate) * min(1.0, (step + 1) / (WARM_UP * first))
    if first:
        return float(options.rate * (1 - (step - first) / options.steps))
    warm_up = WARM_UP * options.steps
    part = (step - warm_up) / (options.steps - warm_up)
    shape = (step + 1) / warm_up if part < 0 else 0.55 + 0.45 * math.cos(math.pi * part)
    return float(options.rate) * shape


class LearningRank:
    """A network, its optimizer and its samples."""

    def __init__(self, net: Any, text: np.ndarray[Any, Any], options: Recipe) -> None:
        self.net = net
        self._text = text
        self._options = options
        self._optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.1)
        self._step = 0

    @property
    def weights(self) -> dict[str, Any]:
        return {name: x.detach() for name, x in self.net.named_parameters()}

    def load(self, weights: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, x in self.net.named_parameters():
                x.copy_(weights[name])

    def compute_gradients(self, rank: int) -> None:
        windows = windows_of(
            self._text, self._options.batch, [self._options.seed, rank, self._step]
        )
        self._optimizer.zero_grad()
        loss_of(self.net, windows).backward()

    def update(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate_at(self._step, self._options)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self._optimizer.step()
        self._step += 1


def train_together(mesh: pmesh.Mesh, rank: LearningRank, steps: int) -> None:
    """Average the gradients in each step."""
    for _ in range(steps):
        rank.compute_gradients(mesh.rank)
        gradients = [x.grad for x in rank.net.parameters()]
        mesh.average_gradients(gradients, out=gradients)
        rank.update()


def train_apart(mesh: pmesh.Mesh, rank: LearningRank, inner_steps: int, options: Recipe) -> None:
    """Average the weights now and then."""
    local = pmesh.LocalUpdates(
        mesh,
        inner_steps=inner_steps,
        outer=pmesh.Nesterov(*options.nesterov) if options.nesterov else "average",
        compression=options.compression,
        fragments=options.fragments,
        delayed=options.delayed,
    )
    rounds = options.steps * options.fragments // inner_steps
    weights = rank.weights
    while local.round < rounds:
        weights, _ = local.begin(weights)
        rank.load(weights)
        for _ in local.steps():
            rank.compute_gradients(mesh.rank)
            rank.update()
        weights = local.end(rank.weights)
    rank.load(local.finish(weights))


def begin(options: Recipe) -> tuple[list[LearningRank], Any]:
    """Ranks with the same weights, after their synchronous steps; and text that they don't see."""
    text, held_out = read_text()
    torch.manual_seed(options.seed)
    first = make_net().state_dict()
    ranks: list[LearningRank] = []
    for _ in range(RANKS):
        net = make_net()
        net.load_state_dict(first)
        ranks.append(LearningRank(net, text, options))
    if options.together_first:
        SimulatedMesh(RANKS).run(
            lambda mesh: train_together(mesh, ranks[mesh.rank], options.together_first)
        )
    return ranks, windows_of(held_out, MEASURED_WINDOWS, [0])


def train_all(options: Recipe) -> Iterator[dict[str, Any]]:
    """A training for each number of inner steps; its options and its held-out loss."""
    torch.set_num_threads(1)
    beginning, windows = begin(options)
    for inner_steps in options.inner_steps:
        ranks = copy.deepcopy(beginning)
        began = time.monotonic()

        def train(
            mesh: pmesh.Mesh, ranks: list[LearningRank] = ranks, steps: int = inner_steps
        ) -> None:
            if steps == 1:
                train_together(mesh, ranks[mesh.rank], options.steps)
            else:
                train_apart(mesh, ranks[mesh.rank], steps, options)

        SimulatedMesh(RANKS).run(train)
        seconds = time.monotonic() - began
        with torch.no_grad():
            loss = statistics.fmean(loss_of(ranks[0].net, x).item() for x in windows.split(64))
        same = all(
            torch.equal(one, other)
            for rank in ranks
            for one, other in zip(rank.net.parameters(), ranks[0].net.parameters(), strict=True)
        )
        yield {
            **asdict(options),
            "inner_steps": inner_steps,
            "parameters": sum(x.numel() for x in ranks[0].net.parameters()),
            "loss": loss,
            "same_bits": same,
            "seconds": seconds,
        }


def sum_up(path: Path) -> None:
    """Print each way to train beside synchronous training with the same seeds, steps and rate."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    ways: dict[tuple[object, ...], dict[int, float]] = defaultdict(dict)
    keys = (
        "together_first",
        "steps",
        "batch",
        "rate",
        "inner_steps",
        "compression",
        "fragments",
        "delayed",
        "nesterov",
    )
    for each in runs:
        ways[tuple(str(each.get(key, 4) or "") for key in keys)][each["seed"]] = each["loss"]
    for way, losses in ways.items():
        plain = ways.get((*way[:4], "1", "", "1", "", ""), {})
        ratios = [losses[seed] / plain[seed] for seed in losses if seed in plain]
        shown = ", ".join(f"{key} {value}" for key, value in zip(keys, way, strict=True) if value)
        mean = f"{statistics.fmean(ratios):.4f} times synchronous" if ratios else ""
        print(f"{shown}: {len(losses)} seeds, loss {statistics.fmean(losses.values()):.4f} {mean}")


def run(
    recipe: Annotated[Recipe, cyclopts.Parameter(name="*")] = Recipe(),
    *,
    report: Path | None = None,
) -> None:
    """What local updates do to the loss of a training; a line of JSON for each.

    Args:
        recipe: How is trained.
        report: Print what the lines in this file say, and train nothing.
    """
    if report is not None:
        sum_up(report)
        return
    for each in train_all(recipe):
        print(json.dumps(each), flush=True)
