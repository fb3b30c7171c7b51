"""Train a small policy: all machines play, one learns, and any of them may be killed.

On each of three machines `pmesh up`, then `pmesh run -- python train_policy.py 3`. The game is to
name handwritten digits; a player is told only whether the name was right.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import pmesh

UPDATES, GAMES, RATE = 10, 500, 6.0
X, LABELS = load_digits().data.astype(np.float32) / 16, load_digits().target


class Player:
    """Stays on its rank, with dice of its own, and plays for the learner."""

    remote_methods = ("play",)

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def play(self, policy: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the mean reward and its gradient, by REINFORCE (Williams, 1992)."""
        rows = self.rng.integers(0, 1500, GAMES)
        odds = np.exp(X[rows] @ policy)
        odds /= odds.sum(axis=1, keepdims=True)
        actions = (odds.cumsum(axis=1) > self.rng.random((GAMES, 1))).argmax(axis=1)
        rewards = (actions == LABELS[rows]).astype(np.float32)
        gain = (rewards - rewards.mean())[:, None] * (np.eye(10, dtype=np.float32)[actions] - odds)
        return float(rewards.mean()), X[rows].T @ gain / GAMES


def kept(calls: Iterable[Callable[[], Any]]) -> Iterator[Any]:
    """Yield the results of the calls whose rank is not lost: the others go on."""
    for call in calls:
        with contextlib.suppress(pmesh.RankLost):
            yield call()


def train(mesh: pmesh.Mesh, rounds: int) -> None:
    """Rank 0 learns. If it is lost, the next one has its rank, and the policy of the last round."""
    mesh.rpc.register(Player)
    policy, done = np.zeros((64, 10), np.float32), 0
    while done < rounds:
        policy, done = mesh.sync((policy, done))  # who comes, or comes back, enters here
        if mesh.rank == 0:
            players = list(kept(partial(mesh.rpc.remote, r, "Player") for r in range(mesh.size)))
            for _ in range(UPDATES):
                calls = list(kept(partial(each.call_async, "play", policy) for each in players))
                rewards, gradients = zip(*kept(call.wait for call in calls), strict=True)
                policy = policy + np.float32(RATE) * np.mean(gradients, axis=0)
            print(f"round {done}: {len(rewards)} players, {np.mean(rewards):.0%} right", flush=True)
        with contextlib.suppress(pmesh.RankLost):  # the learner is lost: the next one goes on
            policy, done = mesh.broadcast(policy), done + 1
    right = (X[1500:] @ policy).argmax(axis=1) == LABELS[1500:]
    print(f"rank {mesh.rank}: accuracy {right.mean():.1%}")


if __name__ == "__main__":
    with pmesh.connect("policy", int(sys.argv[1]), on_superseded="sync") as mesh:
        train(mesh, rounds=20)
