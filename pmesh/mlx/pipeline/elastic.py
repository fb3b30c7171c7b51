"""`ElasticPipeline`: a training in stages that goes on when a machine is lost and comes back."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, cast

import mlx.core as mx
import msgspec
import numpy as np

from pmesh.client.calls.queue import Handle, check_timeout
from pmesh.client.collective.differences import state_differences
from pmesh.client.collective.told import read_untrusted
from pmesh.client.group import Group
from pmesh.client.mesh import Mesh
from pmesh.client.trees.mlx import evaluate
from pmesh.client.trees.state import pack, unpack_untrusted
from pmesh.core.ops.reductions import Values
from pmesh.errors import (
    AgentNotRunning,
    AgentStopped,
    GroupBroken,
    HistorySuperseded,
    NotEnoughRanks,
    RankLost,
    RosterChanged,
    UsageError,
)
from pmesh.mlx.flat import utils
from pmesh.mlx.pipeline.pipeline import STATE_TAG, Pipeline, PipelineReport, ScheduleName, SendAs
from pmesh.mlx.pipeline.rules.checks import check_by, check_communication, check_whole
from pmesh.mlx.pipeline.rules.keeping import KeptStates
from pmesh.mlx.pipeline.rules.meeting import (
    Agreement,
    Holding,
    agree,
    is_settled,
    is_superfluous,
    neighbour,
    replaced,
    stages_of,
)
from pmesh.mlx.pipeline.rules.takeover import (
    RANDOM,
    Parcel,
    State,
    Takeover,
    check_divisible,
    is_due,
    join_modules,
    pick_modules,
    plan_parcels,
    plan_takeover,
)
from pmesh.mlx.pipeline.stages import (
    Layers,
    Stage,
    changing_arrays,
    cut_stage,
    deal_anew,
    layers_of,
    split_layers,
)
from pmesh.mlx.randomness import random_place

_CUT_OFF = (AgentStopped, AgentNotRunning, HistorySuperseded)  # this rank; a sync brings it back
_LOSSES = (RankLost, RosterChanged, GroupBroken, *_CUT_OFF)
_LOOK_EVERY_S = 0.2  # a program takes seconds to start again
_logger = logging.getLogger("pmesh")


class ElasticPipeline:
    """Trains a model in stages as `Pipeline` does, and goes on when a lost machine is back.

    Each rank keeps a copy of its neighbour's stage: its trained weights, the running statistics of
    its BatchNorms, its optimizer's state, and which random numbers come next. A copy is updated
    after each step, while the next one computes. If a rank is lost, the others wait until its
    program, or the same one on another machine, is started again. It gets its stage from the
    neighbour, and all go on from the last step that has ended everywhere. If only its agent was
    lost, the program itself waits for another, and still has its stage. The weights are then those
    of a training without a loss::

        with pmesh.connect(job="stages", wait_for=3) as mesh:
            training = pmesh.mlx.ElasticPipeline(model, mesh, loss, optimizer)
            for step, value in training.train(batch, steps=1000):
                print(step, value)

    Every rank makes the same calls with the same model: a rank that comes back takes from it what
    no copy has, such as frozen weights. Two ranks may be lost at a time if they are not neighbours.
    A rank has what is copied of its own stage twice, and of its neighbour's once, for a moment
    twice.

    Args:
        model: as for `split_layers`. Drop your own reference to a model that is loaded lazily.
        mesh: from `pmesh.connect`; all of its ranks take part.
        loss: as for `Pipeline`.
        optimizer: an optimizer of `mlx.optimizers`, which has not made a step yet.
        by: how many layers each stage has, as for `split_layers`.
        stages_per_rank: as for `split_layers`.
        micro_batch_size: as for `Pipeline`, and so are the next four.
        schedule: see there.
        recompute: see there.
        send_as: see there.
        communication: see there.
        timeout_s: for each message and op.
        wait_s: how long to wait for a rank in place of a lost one, or for an agent of this machine.
        fewer_after_s: how long to wait before the others go on with a stage less: the layers are
            dealt anew, as `split_layers` does; if `by` is given, in the proportions of the stages
            that are left. None: never. Each rank then keeps the whole model, which takes no memory
            for layers that were loaded lazily.

    Raises:
        UsageError: as for `split_layers` and `Pipeline`; all stages have a rank already; or the
            optimizer's state is not laid out by layers, as that of `MultiOptimizer`, and
            `fewer_after_s` is given.
        PmeshError: as for `all_gather`.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - MLX's modules have no types
        mesh: Mesh,
        loss: Callable[[Any, Any], mx.array],
        optimizer: Any,  # noqa: ANN401 - nor have its optimizers
        *,
        by: Sequence[int] | None = None,
        stages_per_rank: int = 1,
        micro_batch_size: int = 4,
        schedule: ScheduleName = "1f1b",
        recompute: bool = True,
        send_as: SendAs | None = None,
        communication: Literal["direct"] = "direct",
        timeout_s: float = 600.0,
        wait_s: float = 3600.0,
        fewer_after_s: float | None = None,
    ) -> None:
        check_whole("stages_per_rank", stages_per_rank)
        check_whole("micro_batch_size", micro_batch_size)
        check_communication(communication)
        if not callable(getattr(optimizer, "init", None)):
            raise UsageError(f"optimizer is one of mlx.optimizers, not {optimizer!r}")
        if fewer_after_s is not None and stages_per_rank > 1:
            raise UsageError("fewer_after_s is for one stage on each rank: leave one of both out")
        self._fewer_after_s = (
            math.inf if fewer_after_s is None else check_timeout(fewer_after_s, "fewer_after_s")
        )
        self._mesh, self._optimizer = mesh, optimizer
        self._timeout_s, self._wait_s = check_timeout(timeout_s), check_timeout(wait_s, "wait_s")
        self._model: Any = model
        self._split = partial(split_layers, stages_per_rank=stages_per_rank)
        self._make_pipeline = partial(
            _SettledPipeline,
            loss=loss,
            settle=self._settle,
            micro_batch_size=micro_batch_size,
            schedule=schedule,
            recompute=recompute,
            send_as=send_as,
            timeout_s=self._timeout_s,
        )
        self._keeps_shares = by is not None
        self._holding = Holding(own=(0,), layers=() if by is None else check_by(by))
        self._kept = KeptStates()
        self._copying: tuple[Handle[None], Handle[Values]] | None = None
        """This rank's state on its way to the next one, and that of the rank before."""
        self._step = 0
        self._stage: Stage | None = None
        self._group: Group | None = None
        self._pipeline: _SettledPipeline | None = None
        self._take_places(self._meet())

    @property
    def step(self) -> int:
        """How many steps are in the weights; smaller again after a loss."""
        return self._step

    @property
    def stage(self) -> Stage:
        """This rank's layers, a module of `mlx.nn`."""
        assert self._stage is not None  # noqa: S101 - from the first meeting on
        return self._stage

    @property
    def number(self) -> int:
        """Which stage this rank has, from 0; its rank in the mesh may be another one."""
        return self._holding.stage

    def report(self) -> PipelineReport:
        """Return where the time of the last step went, as `Pipeline.report` does."""
        assert self._pipeline is not None  # noqa: S101 - as above
        return self._pipeline.report()

    def train(
        self, batch: Callable[[int], tuple[Any, Any]], steps: int
    ) -> Iterator[tuple[int, float]]:
        """Train until so many steps are in the weights.

        Args:
            batch: takes the number of a step, from 0, and returns x and y as for `Pipeline.step`.
                The same number may come again after a loss, on each rank.
            steps: as many as all training so far is to have; none are made if it has them.

        Yields:
            The number of each step that this rank has made, and its loss.

        Raises:
            UsageError: `batch` does not return two values, or as for `Pipeline.step`.
            RosterChanged: a stage is lost with its copy.
            NotEnoughRanks: nobody has come in place of a lost rank within `wait_s`.
            PmeshError: as for `Pipeline.step`.
        """
        check_whole("steps", steps, least=0)
        while True:
            while self._step < steps:
                number = self._step
                try:
                    value = self._advance(*_pair(batch(number), number))
                except _LOSSES as e:
                    self._part(e)
                    self._take_places(self._meet())
                else:
                    yield number, value
            holdings = self._meet()  # a rank that was lost after its last step has not ended it
            if is_settled(holdings, steps) and not is_due(holdings):
                return
            self._part(None)
            self._take_places(holdings)

    # --- one step

    def _advance(self, x: Any, y: Any) -> float:  # noqa: ANN401 - trees of arrays
        assert self._pipeline is not None  # noqa: S101 - as above
        self._begin_copy()
        value, gradients = self._pipeline.step(x, y)
        # All ranks have settled, so all have the copies of this step.
        self._kept.forget_before(self._step)
        self._optimizer.update(self.stage, gradients)
        self._step += 1
        self._keep()
        evaluate([self.stage.parameters()])  # else other state of modules would keep all graphs
        return value

    def _begin_copy(self) -> None:
        """Send the state to the next stage's rank, and receive that of the stage before."""
        group, timeout_s = self._group, self._timeout_s
        assert group is not None  # noqa: S101 - as above
        self._copying = None
        if group.size == 1:
            return
        values = _bytes_of(self._kept.own[self._step])
        before, after = (self.number - 1) % group.size, neighbour(self.number, group.size)
        receiving = group.recv(before, STATE_TAG, timeout_s, async_op=True)
        sending = group.send(values, after, STATE_TAG, timeout_s, async_op=True)
        self._copying = sending, receiving

    def _settle(self) -> None:
        if self._copying is not None:
            sending, receiving = self._copying
            self._kept.copies[self._step] = receiving.wait()
            sending.wait()

    def _keep(self) -> None:
        """Keep the arrays that the stage has now; MLX does not write to arrays that others have."""
        state = {
            "weights": changing_arrays(self.stage),
            "optimizer": self._optimizer.state,
            RANDOM: _randomness(),
        }
        self._kept.own[self._step] = kept = _in_new_containers(state)
        evaluate([kept])

    # --- after a loss

    def _meet(self) -> list[Holding]:
        """Return what each rank has, as soon as there is one for each stage."""
        began = time.monotonic()
        give_up = began + self._wait_s
        while True:
            try:
                self._mesh.sync(None, self._timeout_s)  # it waits for this rank's own agent
                self._holding = msgspec.structs.replace(
                    self._holding,
                    own=tuple(self._kept.own) or (0,),
                    copies=tuple(self._kept.copies),
                    has_waited=time.monotonic() - began >= self._fewer_after_s,
                )
                own = msgspec.to_builtins(self._holding)
                told = self._mesh.all_gather_object(own, self._timeout_s)
            except _LOSSES as e:
                if isinstance(e, _CUT_OFF) and time.monotonic() >= give_up:
                    raise
                _logger.warning("pipeline: %s while the ranks meet; they begin again", e)
                continue
            if self._mesh._place.is_alone:  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
                continue  # the job has continued without this rank: the next sync brings it back
            holdings = read_untrusted(told, Holding, self._mesh.names, "its stage")
            if self._mesh.rank in (others := replaced(holdings)):
                raise UsageError(
                    f"this rank was away, and another one has its stage {self.number} of the "
                    "pipeline: start this program again when a rank is lost"
                )
            stages = stages_of(holdings)
            if (len(holdings) == stages and not others) or is_due(holdings):
                return holdings
            if is_superfluous(self._mesh.rank, holdings):
                raise UsageError(
                    f"all {stages} stages of this pipeline have a rank: start this program when "
                    "one is lost"
                )
            if time.monotonic() >= give_up:
                raise NotEnoughRanks(
                    f"{len(holdings)} of the {stages} ranks of this pipeline are here, and nobody "
                    f"has come within {self._wait_s:g} s (wait_s): start all ranks again from a "
                    "checkpoint"
                )
            time.sleep(_LOOK_EVERY_S)

    def _take_places(self, holdings: list[Holding]) -> None:
        """Take the stage on which all agree, and go on from the same step as the others."""
        while True:
            if is_due(holdings):
                go_on = partial(self._take_over, plan_takeover(holdings), holdings)
            else:
                agreement = agree(holdings, self._mesh.names)
                self._take(holdings, agreement.ranks, agreement.layers)
                go_on = partial(self._go_on, agreement)
            try:
                go_on()
            except _LOSSES as e:
                self._part(e)
                holdings = self._meet()
            else:
                return

    def _take(
        self, holdings: list[Holding], ranks: tuple[int, ...], layers: tuple[int, ...]
    ) -> None:
        """Note the place that this rank has from now on: on all ranks, or on none."""
        self._holding = msgspec.structs.replace(
            self._holding,
            meetings=max(each.meetings for each in holdings) + 1,
            stage=ranks.index(self._mesh.rank),
            layers=layers,
            machines=tuple(self._mesh.names[rank] for rank in ranks),
        )

    def _take_over(self, plan: Takeover, holdings: list[Holding]) -> None:
        """Go on with fewer stages: each rank gets its layers from those that have their state."""
        group = self._mesh.group(plan.ranks, self._timeout_s)
        assert group is not None  # noqa: S101 - each rank has a stage
        self._group = group
        model = layers_of(self._model)
        counts = self._deal(plan, model, group)
        before = [
            cut_stage(model, plan.before, s, len(plan.before)) for s in range(len(plan.before))
        ]
        after = [cut_stage(model, counts, place, group.size) for place in range(group.size)]
        state = self._hand_over(plan, before, after, group)
        stage = after[plan.place_of(self.number)]
        pipeline = self._make_pipeline(stage, group)  # the ranks meet in it: all go on, or none
        self._take(holdings, plan.ranks, counts)
        self._stage, self._pipeline = stage, pipeline
        self._kept = KeptStates({plan.step: state})
        self._restore(plan.step)
        lost = sorted({*range(len(before))} - {*plan.left})
        _logger.warning(
            "pipeline: all %d ranks go on from step %d without stage %s; they have %s layers",
            *(group.size, plan.step, ", ".join(map(str, lost)), ", ".join(map(str, counts))),
        )

    def _deal(self, plan: Takeover, model: Layers, group: Group) -> tuple[int, ...]:
        """Return how many layers each stage that is left has from now on."""
        begin = sum(plan.before[: self.number])
        own = range(begin, begin + plan.before[self.number])
        shares = [plan.before[stage] for stage in plan.left]
        try:
            return deal_anew(model, group, own, shares, keeps_shares=self._keeps_shares)
        except UsageError as e:  # on all ranks
            _logger.warning("pipeline: a stage beside the lost one takes all its layers: %s", e)
            return plan.joined

    def _hand_over(
        self, plan: Takeover, before: list[Stage], after: list[Stage], group: Group
    ) -> State:
        """Send modules and receive others; return the state of this rank's stage from now on."""
        was, timeout_s = self.number, self._timeout_s
        if self._stage is None:  # lost before the first step
            self._begin(before[was])
        own = self._kept.own[plan.step]
        self.stage.update(own["weights"])  # modules that go to others are as made at step 0, too
        had, wanted = _numbered(before, after)
        states: dict[int, State] = {was: own}
        for lost in {*range(len(before))} - {*plan.left}:
            states[lost] = made = self._as_made(before[lost].layers)
            if plan.keepers.get(lost) == was:
                copy = self._kept.copies[plan.step]
                states[lost] = self._read_untrusted(copy, made, plan.place_of(was))
        parcels = [each for each in plan_parcels(plan, had, wanted) if was in each.between]
        receiving = list[tuple[Parcel, Handle[Values]]]()
        sending = list[Handle[None]]()
        for parcel in parcels:
            giver, receiver = map(plan.place_of, parcel.between)
            if parcel.giver != was:
                handle = group.recv(giver, STATE_TAG, timeout_s, async_op=True)
                receiving.append((parcel, handle))
            elif parcel.receiver != was:
                values = _bytes_of(pick_modules(states[parcel.stage], parcel.places))
                sending.append(group.send(values, receiver, STATE_TAG, timeout_s, async_op=True))
        found = [
            (parcel.modules, pick_modules(states[parcel.stage], parcel.places))
            for parcel in parcels
            if parcel.between == (was, was)
        ]
        for parcel, received in receiving:
            made = self._as_made([before[parcel.stage].layers[place] for place in parcel.places])
            giver = plan.place_of(parcel.giver)
            found.append((parcel.modules, self._read_untrusted(received.wait(), made, giver)))
        for sent in sending:
            sent.wait()
        return join_modules(own, found, wanted[plan.place_of(was)])

    def _as_made(self, modules: Sequence[Any]) -> State:
        """Return the state that modules of this rank's model have before their first step."""
        made: dict[str, Any] = {}
        self._optimizer.state = made  # until `_restore`
        self._optimizer.init({"layers": [module.trainable_parameters() for module in modules]})
        weights = {"layers": [changing_arrays(module) for module in modules]}
        return {"weights": weights, "optimizer": made}

    def _begin(self, stage: Stage) -> None:
        self._stage = stage
        self._optimizer.init(stage.trainable_parameters())
        if not math.isinf(self._fewer_after_s):
            check_divisible(type(self._optimizer).__name__, self._optimizer.state)
        self._keep()

    def _go_on(self, agreement: Agreement) -> None:
        group = self._mesh.group(agreement.ranks, self._timeout_s)
        assert group is not None  # noqa: S101 - each rank has a stage
        self._group = group
        if self._stage is None:
            self._begin(self._split(self._model, group, by=agreement.layers or None))
            if math.isinf(self._fewer_after_s):
                self._model = None
        layers = self.stage.layout.counts
        self._holding = msgspec.structs.replace(self._holding, layers=layers)
        self._pipeline = self._make_pipeline(self.stage, group)
        step, number, size = agreement.step, self._holding.stage, group.size
        for receiver in agreement.receivers:
            giver = neighbour(receiver, size)
            if number == giver:
                group.send(self._kept.copies[step], receiver, STATE_TAG, self._timeout_s)
            if number == receiver:
                found = group.recv(giver, STATE_TAG, self._timeout_s)
                own = next(iter(self._kept.own.values()))
                self._kept.own = {step: self._read_untrusted(found, own, giver)}
        self._restore(step)
        if self._holding.meetings > 1:
            _logger.warning("pipeline: all %d ranks go on from step %d", size, step)

    def _read_untrusted(self, found: Values, own: Any, giver: int) -> Any:  # noqa: ANN401 - trees
        state = unpack_untrusted(found.reshape(-1).view(np.uint8), own)
        source = f"rank {self._mesh.rank} ({self._mesh.names[self._mesh.rank]})"
        differs = state_differences(own, state, source=f"the rank of stage {giver}")
        if differs or not isinstance(state, dict):
            raise UsageError(
                f"{source} has another model or optimizer than the pipeline: {differs}; start the "
                "same program there"
            )
        return cast("Any", state)

    def _restore(self, step: int) -> None:
        """Make the stage what it was after this step."""
        state = _in_new_containers(self._kept.own[step])
        self.stage.update(state["weights"])
        mx.random.seed(state[RANDOM]["place"].item())
        self._optimizer.state = state["optimizer"]
        self._optimizer.init(self.stage.trainable_parameters())  # else it inits with gradients,
        # which lack the layers at the end of a list that have no weights
        self._step = step
        self._kept.go_back(step)

    def _part(self, why: Exception | None) -> None:
        """Leave the group, so that no rank waits for a message of this one."""
        if self._group is not None:
            self._group.close()
        self._group = None
        if why is not None:
            _logger.warning(
                "pipeline: %s; the others wait for a rank in its place: start the same program "
                "there, or on another machine",
                why,
            )


def _pair(found: Any, number: int) -> tuple[Any, Any]:  # noqa: ANN401 - what a user's function returns
    kind = type(found).__name__
    if not isinstance(found, tuple | list) or len(cast("list[Any]", found)) != 2:  # noqa: PLR2004
        raise UsageError(f"batch({number}) returns x and y, not {kind}")
    x, y = cast("list[Any]", found)
    return x, y


def _numbered(*deals: list[Stage]) -> list[list[list[int]]]:
    """Return the modules of each stage as numbers, the same ones in all deals of one model."""
    number_of: dict[int, int] = {}
    return [
        [
            [number_of.setdefault(id(module), len(number_of)) for module in stage.layers]
            for stage in stages
        ]
        for stages in deals
    ]


def _randomness() -> dict[str, mx.array]:
    return {"place": mx.array(np.array(random_place(), np.uint64))}


def _bytes_of(state: State) -> Values:
    packed = pack(state)
    values = np.empty(packed.nbytes, np.uint8)
    packed.copy_to(values, 0)
    return values


def _in_new_containers(tree: Any) -> Any:  # noqa: ANN401 - a tree of arrays
    """Return the same arrays in new containers."""

    def same(x: object) -> object:
        return x

    return utils.tree_map(same, tree)


class _SettledPipeline(Pipeline):
    """A pipeline whose step ends only once all ranks have called `settle`."""

    def __init__(
        self,
        stage: Stage,
        group: Group,
        loss: Callable[[Any, Any], mx.array],
        settle: Callable[[], None],
        **options: Any,  # noqa: ANN401 - those of `Pipeline`
    ) -> None:
        super().__init__(stage, group, loss, **options)
        self._settle = settle

    def _before_exchange(self) -> None:
        self._settle()
