"""Which states a rank keeps, so that all can go back to the last step that has ended everywhere."""

from dataclasses import dataclass, field

from pmesh.core.ops.reductions import Values
from pmesh.mlx.pipeline.rules.takeover import State


@dataclass(slots=True)
class KeptStates:
    """The states of a rank's stage, and of the stage before it, each by the step that it follows.

    >>> kept = KeptStates(own={1: {"weights": ...}, 2: {"weights": ...}})
    >>> kept.go_back(1)
    >>> list(kept.own)
    [1]
    """

    own: dict[int, State] = field(default_factory=dict[int, State])
    """Those of this rank's stage."""
    copies: dict[int, Values] = field(default_factory=dict[int, Values])
    """Those of the stage before it, as bytes."""

    def forget_before(self, step: int) -> None:
        """Keep the states after this step alone, as all ranks have the copies of these."""
        self.own = {step: self.own[step]}
        self.copies = {step: self.copies[step]} if step in self.copies else {}

    def go_back(self, step: int) -> None:
        """Forget the states after later steps.

        Those before stay until this step has ended: a rank may be lost again before the copies of
        this state have arrived.
        """
        self.own = {number: own for number, own in self.own.items() if number <= step}
        self.copies = {number: copy for number, copy in self.copies.items() if number <= step}
