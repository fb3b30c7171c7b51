"""Which states a rank of a pipeline keeps."""

import numpy as np

from pmesh.mlx.pipeline.rules.keeping import KeptStates
from pmesh.mlx.pipeline.rules.takeover import State

COPY = np.zeros(3)


def state(step: int) -> State:
    return {"weights": step}


def test_the_states_before_a_step_stay_until_it_has_ended_after_a_loss_too() -> None:
    """A rank that has come back with its stage may be lost before its next copy has arrived."""
    kept = KeptStates({1: state(1), 2: state(2)}, {1: COPY})
    kept.go_back(2)
    assert ({*kept.own}, {*kept.copies}) == ({1, 2}, {1})
    kept.forget_before(2)
    assert (kept.own, kept.copies) == ({2: state(2)}, {})


def test_the_states_after_a_step_go_with_its_return() -> None:
    kept = KeptStates({1: state(1), 2: state(2)}, {1: COPY, 2: COPY})
    kept.go_back(1)
    assert ({*kept.own}, {*kept.copies}) == ({1}, {1})


def test_the_copy_of_a_step_that_has_ended_everywhere_stays_with_its_state() -> None:
    kept = KeptStates({1: state(1), 2: state(2)}, {1: COPY, 2: COPY})
    kept.forget_before(2)
    assert ({*kept.own}, {*kept.copies}) == ({2}, {2})
