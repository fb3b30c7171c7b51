"""What local updates do to a training: a character transformer on the standard library's sources.

Four ranks train as threads of one process, which make the calls that a user's script makes. Each
line that is printed is one run: the loss is that of text that no rank has seen, in nats for each
character. All runs with one seed begin with the same weights and draw the same samples.

    $ python -m tools.bench.local_updates --seed 1 >> runs.jsonl  # synchronous
    $ python -m tools.bench.local_updates --seed 1 --inner-steps 500 >> runs.jsonl
    $ python -m tools.bench.local_updates --report runs.jsonl
"""

import argparse
import importlib
import json
import math
import statistics
import sys
import sysconfig
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

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


def rate_at(step: int, options: argparse.Namespace) -> float:
    """A rise, then half a cosine down to a tenth."""
    warm_up = WARM_UP * options.steps
    part = (step - warm_up) / (options.steps - warm_up)
    shape = (step + 1) / warm_up if part < 0 else 0.55 + 0.45 * math.cos(math.pi * part)
    return float(options.rate) * shape


class Rank:
    """A network, its optimizer and its samples."""

    def __init__(self, net: Any, text: np.ndarray[Any, Any], options: argparse.Namespace) -> None:
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


def train_together(mesh: pmesh.Mesh, rank: Rank, options: argparse.Namespace) -> None:
    """Average the gradients in each step."""
    for _ in range(options.steps):
        rank.compute_gradients(mesh.rank)
        gradients = [x.grad for x in rank.net.parameters()]
        mesh.average_gradients(gradients, out=gradients)
        rank.update()


def train_apart(mesh: pmesh.Mesh, rank: Rank, options: argparse.Namespace) -> None:
    """Average the weights now and then."""
    local = pmesh.LocalUpdates(
        mesh,
        inner_steps=options.inner_steps,
        outer=pmesh.Nesterov(*options.nesterov) if options.nesterov else "average",
        compression=options.compression,
        fragments=options.fragments,
        delayed=options.delayed,
    )
    rounds = options.steps * options.fragments // options.inner_steps
    weights = rank.weights
    while local.round < rounds:
        weights, _ = local.begin(weights)
        rank.load(weights)
        for _ in local.steps():
            rank.compute_gradients(mesh.rank)
            rank.update()
        weights = local.end(rank.weights)
    rank.load(local.finish(weights))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One training; returns its options and the held-out loss."""
    torch.set_num_threads(1)
    text, held_out = read_text()
    torch.manual_seed(options.seed)
    first = make_net().state_dict()
    ranks: list[Rank] = []
    for _ in range(RANKS):
        net = make_net()
        net.load_state_dict(first)
        ranks.append(Rank(net, text, options))
    began = time.monotonic()
    how = train_apart if options.inner_steps else train_together
    SimulatedMesh(RANKS).run(lambda mesh: how(mesh, ranks[mesh.rank], options))
    seconds = time.monotonic() - began
    with torch.no_grad():
        windows = windows_of(held_out, MEASURED_WINDOWS, [0])
        loss = statistics.fmean(loss_of(ranks[0].net, part).item() for part in windows.split(64))
    same = all(
        torch.equal(one, other)
        for rank in ranks
        for one, other in zip(rank.net.parameters(), ranks[0].net.parameters(), strict=True)
    )
    parameters = sum(x.numel() for x in ranks[0].net.parameters())
    chosen = {key: value for key, value in vars(options).items() if key != "report"}
    return {**chosen, "parameters": parameters, "loss": loss, "same_bits": same, "seconds": seconds}


def report(path: Path) -> None:
    """Print each way to train beside synchronous training with the same seeds, steps and rate."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    ways: dict[tuple[object, ...], dict[int, float]] = defaultdict(dict)
    keys = (
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
        plain = ways.get((*way[:3], "", "", "1", "", ""), {})
        ratios = [losses[seed] / plain[seed] for seed in losses if seed in plain]
        shown = ", ".join(f"{key} {value}" for key, value in zip(keys, way, strict=True) if value)
        mean = f"{statistics.fmean(ratios):.4f} times synchronous" if ratios else ""
        print(f"{shown}: {len(losses)} seeds, loss {statistics.fmean(losses.values()):.4f} {mean}")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=4, help="windows of each rank in a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--inner-steps", type=int, help="none: synchronous")
    parser.add_argument("--compression")
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--delayed", action="store_true")
    parser.add_argument("--nesterov", type=float, nargs=2, help="the outer rate and momentum")
    parser.add_argument("--report", type=Path, help="print what the runs in this file say")
    options = parser.parse_args(argv)
    if options.report:
        report(options.report)
    else:
        print(json.dumps(run(options)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
