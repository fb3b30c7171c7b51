"""The example that trains a policy, while its learner and a player are lost."""

import re

import numpy as np
import pytest

from examples import train_policy
from pmesh.testing import SimulatedMesh
from tests.worlds.faults import Faults, Real

pytest.importorskip("sklearn")
ROUNDS = 3


def test_the_others_train_on_without_a_lost_player_and_a_lost_learner(
    faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = SimulatedMesh(4, on_loss="continue")
    games = iter(range(10**6))

    def play_until_lost(play: Real, player: train_policy.Player, policy: np.ndarray) -> object:
        match next(games):
            case 6:
                simulated.lose(3)
            case 50:  # in the second round: 4 and then 3 players play ten times in each
                simulated.lose(0)
        return play(player, policy)

    faults.around(train_policy.Player, "play", play_until_lost)
    simulated.run(lambda mesh: train_policy.train(mesh, ROUNDS))

    output = capsys.readouterr().out
    players = [int(found) for found in re.findall(r"round \d+: (\d) players", output)]
    assert set(players) <= {4, 3, 2}
    assert players[-1] == 2
    accuracies = re.findall(r"accuracy ([\d.]+)%", output)
    assert len(accuracies) == 2
    assert len(set(accuracies)) == 1
    assert float(accuracies[0]) > 50
