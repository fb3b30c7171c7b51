"""The jobs and trainers of one simulated agent, and what it knows of them."""

from collections.abc import Iterable, Mapping
from random import Random

from pmesh.core.messages import AskResult, RankMarks, Waiting
from pmesh.core.rosters import is_same_history
from pmesh.core.standing import Facts, Peer
from pmesh.core.views import Roster, View
from pmesh.ids import Incarnation, JobName, Member, Rank, Slot
from pmesh.testing.job_host import JobHost
from pmesh.testing.jobs import LocalJob
from pmesh.testing.lane_messages import LaneMessage, age
from pmesh.testing.timeline import Timeline
from pmesh.testing.trainers import Habits, Trainer, chance


class LocalJobs:
    """Brings a view's rosters to the local jobs, and the lanes' messages."""

    def __init__(self, host: JobHost, me: Member) -> None:
        self.running: dict[JobName, LocalJob] = {}
        self._host = host
        self._me = me
        self._trainers: dict[Slot, Trainer] = {}
        self._early: list[LaneMessage] = []

    @property
    def trainers(self) -> tuple[Trainer, ...]:
        """The training processes that are connected."""
        return tuple(trainer for trainer in self._trainers.values() if trainer.alive)

    def employ(
        self, habits: Iterable[Habits], share: float, timeline: Timeline, random: Random
    ) -> None:
        """Each job that this machine takes part in gets its trainer back, at the next such call."""
        for theirs in habits:
            employed = any(trainer.habits is theirs for trainer in self.trainers)
            if not employed and chance(random, share):
                slot = Slot(len(self._trainers))
                self._trainers[slot] = Trainer(timeline, random, slot, theirs)
                self._host.facts_changed()

    def install(self, view: View) -> None:
        """Begin, continue and end jobs as the view says."""
        for name, job in list(self.running.items()):
            roster = view.roster_of(name)
            if roster is None or not _goes_on(job, roster):
                del self.running[name]
                job.supersede()
        for roster in view.rosters:
            ranks = roster.ranks_of(self._me)
            if roster.job in self.running:
                self.running[roster.job].install(roster)
            elif ranks and not set(ranks) <= roster.lost_ranks:
                self._begin(roster, ranks)

    def receive_early(self) -> None:
        """V4: what came before its view is due now, or still early, or late by now."""
        early, self._early = self._early, []
        for message in early:
            self.receive(message)

    def receive(self, message: LaneMessage) -> None:
        """A lane has brought a message."""
        job = self.running.get(message.job)
        by = age(message, None if job is None else job.roster)
        if by > 0:
            self._early.append(message)
        elif job is not None and by == 0:
            job.receive(message)

    def asked_of(self, ask: AskResult) -> LocalJob | None:
        """The job that is asked for a result; None while one side lacks the other's view."""
        job = self.running.get(ask.job)
        if job is None or (job.roster.born, job.roster.number) != (ask.born, ask.number):
            return None
        return job

    def facts(self, view: View, round_trips: Mapping[Incarnation, int]) -> Facts:
        """What the agreement is told."""
        jobs = self.running.values()
        return Facts(
            reports=tuple(job.report() for job in jobs),
            waiting=tuple(
                Waiting(trainer.habits.job, trainer.slot, trainer.habits.wait_for)
                for trainer in self.trainers
                if trainer.waiting and view.roster_of(trainer.habits.job) is None
            ),
            concerns=tuple(concern for job in jobs for concern in job.concerns()),
            marks=tuple(marks for job in jobs for marks in job.marks()),
            round_trips=round_trips,
        )

    def pass_time(self, own: Iterable[RankMarks], peers: Iterable[Peer]) -> None:
        """Forget what is stable, and ask again for what is overdue."""
        own, peers = tuple(own), tuple(peers)
        for job in list(self.running.values()):
            job.stabilize(_stable_mark(job.roster, own, peers))
            job.pass_time()

    def _begin(self, roster: Roster, ranks: tuple[Rank, ...]) -> None:
        trainers = {rank: self._trainers[roster.trainers[rank].slot] for rank in ranks}
        job = self.running[roster.job] = LocalJob(self._host, roster, trainers)
        for rank, trainer in trainers.items():
            trainer.begin(job, rank)


def _stable_mark(roster: Roster, own: Iterable[RankMarks], peers: Iterable[Peer]) -> int:
    """O2: the op up to which all ranks say that they have ended; of this very roster."""
    ended = {marks.rank: marks.completed for marks in own if marks.job == roster.job}
    for peer in peers:
        theirs = peer.view.roster_of(roster.job)
        if theirs is not None and theirs.born == roster.born:
            for marks in peer.heartbeat.marks:
                if marks.job == roster.job and marks.number == roster.number:
                    ended[marks.rank] = marks.completed
    return min(ended.get(Rank(rank), -1) for rank in range(len(roster.trainers)))


def _goes_on(job: LocalJob, roster: Roster) -> bool:
    """Of a rank whose trainer has left, that it counts as lost is our own word."""
    return all(
        is_same_history(job.roster, roster, rank)
        or (not trainer.alive and roster.born == job.roster.born)
        for rank, trainer in job.trainers.items()
    )
