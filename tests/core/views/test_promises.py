"""How a member answers a proposal and a commit: V1, V2, V3, V7 and I2 of the design."""

from dataclasses import replace

import pytest

from pmesh.core.views.agreement import lose
from pmesh.core.views.state import (
    Facts,
    FenceJobs,
    Install,
    MemberStep,
    PendingJoin,
    SendOnLink,
)
from pmesh.core.wire.views import Commit, Flushed, Propose, Refuse, Superseded, TellView, Veto
from pmesh.errors import ProtocolError
from pmesh.ids import Member
from tests.core.views.one_member import (
    BERTS,
    CARA_LOST_ANNA,
    NOW,
    TRIO,
    commit,
    promising,
    sent,
    told,
)
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DIGITS,
    DORA,
    FACES,
    all_hearing_each_other,
    make_epoch,
    make_flushed,
    make_heartbeat,
    make_member,
    make_peer,
    make_proposal,
    make_report,
    make_roster,
    make_state,
    make_view,
    make_waiting,
    running,
)

CARAS = all_hearing_each_other(CARA, TRIO, ANNA, BERT)


class TestAProposalIsAnswered:
    PROPOSAL = make_proposal(ANNA, 6, TRIO, ANNA, BERT, CARA)

    def test_with_a_promise_and_what_the_member_has_installed(self) -> None:
        step = told(BERTS, ANNA, self.PROPOSAL)
        answer = make_flushed(BERT, TRIO, epoch=make_epoch(6))
        assert step.actions == (FenceJobs(()), SendOnLink(ANNA, answer))
        assert (step.state.promised, step.state.flushed_at) == (make_epoch(6), NOW)
        assert step.state.highest_counter == 6

    def test_with_who_waits_here(self) -> None:
        facts = Facts(waiting=(make_waiting(3),))
        ((_, answer),) = sent(told(BERTS, ANNA, self.PROPOSAL, facts=facts))
        assert isinstance(answer, Flushed)
        assert answer.waiting == facts.waiting

    def test_with_a_fence_before_the_answer_around_the_jobs_it_names(self) -> None:
        """V3, and V7: the other job runs on."""
        digits, faces = make_roster(ANNA, BERT), make_roster(BERT, job=FACES)
        reports = [make_report(r, {0: [running(3)]}, fenced=False) for r in (digits, faces)]
        proposal = make_proposal(ANNA, 6, TRIO, ANNA, BERT, jobs=[DIGITS])
        fence, answer = told(
            BERTS, ANNA, proposal, facts=Facts(reports=lambda: tuple(reports))
        ).actions
        assert fence == FenceJobs((DIGITS,))
        assert isinstance(answer, SendOnLink)
        assert isinstance(answer.message, Flushed)
        assert [(r.job, r.fenced) for r in answer.message.jobs] == [(DIGITS, True), (FACES, False)]

    def test_with_a_fence_around_every_job_if_its_base_is_another_view(self) -> None:
        """Which jobs are concerned was judged by rosters that may not be ours."""
        elsewhere = replace(BERTS, view=make_view(4, *TRIO.members))
        base = make_view(5, *TRIO.members, previous=make_epoch(4))
        report = make_report(make_roster(BERT), {0: []}, fenced=False)
        step = told(
            replace(elsewhere, promised=make_epoch(4)),
            ANNA,
            make_proposal(ANNA, 6, base, *TRIO.members),
            facts=Facts(reports=lambda: (report,)),
        )
        assert step.actions[0] == FenceJobs((DIGITS,))

    def test_once_if_it_comes_twice(self) -> None:
        state = told(BERTS, ANNA, self.PROPOSAL).state
        assert told(state, ANNA, self.PROPOSAL) == MemberStep(state)

    def test_with_a_promise_to_whoever_has_the_higher_epoch(self) -> None:
        """V1: a later promise replaces the earlier one, and ends an attempt of one's own."""
        leading = lose(CARA_LOST_ANNA, ANNA.node, "closed", Facts(), now=NOW).state
        assert leading.proposal is not None
        base = make_view(6, CARA, BERT, previous=TRIO.epoch)
        step = told(leading, CARA, make_proposal(CARA, 9, base, CARA, BERT))
        assert step.state.promised == make_epoch(9, CARA)
        assert step.state.proposal is None

    @pytest.mark.parametrize("counter", [6, 7])
    def test_with_a_refusal_that_carries_the_promise_if_that_is_higher(self, counter: int) -> None:
        """V1: a proposal must exceed the promise, not only what is installed."""
        state = promising(8)
        step = told(state, ANNA, make_proposal(ANNA, counter, TRIO, *TRIO.members))
        assert sent(step) == [(ANNA, Refuse(make_epoch(counter), make_epoch(8)))]
        assert step.state == state

    def test_with_proof_for_a_proposer_that_the_line_left_behind(self) -> None:
        """V2: Dora still counts Bert as hers, but his view has neither her nor hers before it."""
        doras = make_view(4, DORA, BERT)
        step = told(BERTS, DORA, make_proposal(DORA, 9, doras, DORA, BERT))
        assert sent(step) == [(DORA, Superseded(TRIO))]
        assert step.state == BERTS

    def test_for_a_proposer_out_of_view_that_has_gone_on_from_it(self) -> None:
        """V2: its base records our epoch as our last."""
        base = make_view(6, DORA, BERT, previous=TRIO.epoch)
        step = told(BERTS, DORA, make_proposal(DORA, 9, base, DORA, BERT))
        assert step.state.promised == make_epoch(9, DORA)

    def test_with_a_veto_if_it_passes_over_a_senior_who_is_heard(self) -> None:
        step = told(CARAS, BERT, make_proposal(BERT, 6, TRIO, BERT, CARA))
        assert sent(step) == [(BERT, Veto(make_epoch(6, BERT)))]
        assert step.state == CARAS

    def test_without_a_veto_if_that_senior_is_not_heard(self) -> None:
        state = all_hearing_each_other(CARA, TRIO, BERT)
        step = told(
            replace(state, quiet_until=NOW + 9), BERT, make_proposal(BERT, 6, TRIO, BERT, CARA)
        )
        assert step.state.promised == make_epoch(6, BERT)

    def test_without_a_veto_if_that_senior_has_gone_another_way(self) -> None:
        elsewhere = make_view(7, ANNA, DORA)
        anna = make_peer(ANNA, elsewhere, make_heartbeat(elsewhere, CARA))
        bert = CARAS.peers[BERT.node]
        state = replace(make_state(CARA, TRIO, anna, bert), quiet_until=NOW + 9)
        step = told(state, BERT, make_proposal(BERT, 8, TRIO, BERT, CARA))
        assert step.state.promised == make_epoch(8, BERT)

    def test_without_a_veto_if_the_senior_who_is_passed_over_is_oneself(self) -> None:
        """The proposer's view has another order: one whom it asks does not lack a leader."""
        base = make_view(6, CARA, BERT, ANNA, previous=TRIO.epoch)
        step = told(BERTS, CARA, make_proposal(CARA, 7, base, CARA, BERT, ANNA))
        assert step.state.promised == make_epoch(7, CARA)

    def test_by_a_newcomer_if_the_view_that_takes_it_in_is_heavier(self) -> None:
        anna = make_peer(ANNA, TRIO, make_heartbeat(TRIO, DORA))
        proposal = make_proposal(ANNA, 6, TRIO, ANNA, DORA, continuing=[ANNA])
        step = told(make_state(DORA, make_view(3, DORA), anna), ANNA, proposal)
        assert step.state.promised == make_epoch(6)

    def test_and_soon_forgotten_if_its_leader_is_not_heard(self) -> None:
        """V6: its commit may never come."""
        state = told(make_state(CARA, TRIO), ANNA, self.PROPOSAL).state
        assert state.promised == make_epoch(7, CARA)

    def test_with_a_veto_by_a_newcomer_whose_own_view_is_heavier(self) -> None:
        """V9."""
        alone = make_state(DORA, make_view(3, DORA))
        base = make_view(2, ANNA)
        step = told(alone, ANNA, make_proposal(ANNA, 6, base, ANNA, DORA, continuing=[ANNA]))
        assert sent(step) == [(ANNA, Veto(make_epoch(6)))]

    @pytest.mark.parametrize(
        ("sender", "proposal", "why"),
        [
            pytest.param(
                make_member("a", incarnation=99),
                PROPOSAL,
                "another's name",
                id="in the name of a former process",
            ),
            pytest.param(
                ANNA, make_proposal(ANNA, 6, TRIO, ANNA, CARA), "leaves out", id="not meant for us"
            ),
        ],
    )
    def test_with_a_protocol_error_if_no_honest_leader_would_send_it(
        self, sender: Member, proposal: Propose, why: str
    ) -> None:
        with pytest.raises(ProtocolError, match=why):
            told(BERTS, sender, proposal)


ASKED = PendingJoin(NOW, whole=False)


class TestACommitIsInstalled:
    VIEW = make_view(6, ANNA, BERT, CARA, previous=TRIO.epoch)

    def test_if_its_epoch_is_what_was_promised(self) -> None:
        step = told(promising(6), ANNA, commit(self.VIEW))
        assert step.actions == (Install(self.VIEW),)
        assert (step.state.view, step.state.flushed_at) == (self.VIEW, None)
        assert (step.state.installed_at, step.state.highest_counter) == (NOW, 6)

    def test_not_if_more_has_been_promised_since(self) -> None:
        """V1."""
        state = promising(7)
        assert told(state, ANNA, commit(self.VIEW)) == MemberStep(state)

    def test_not_if_nothing_has_been_promised(self) -> None:
        """V1: whoever commits it has no answer of ours."""
        assert told(BERTS, ANNA, commit(self.VIEW)) == MemberStep(BERTS)

    def test_not_again_if_it_comes_twice(self) -> None:
        """I2."""
        state = told(promising(6), ANNA, commit(self.VIEW)).state
        assert told(state, ANNA, commit(self.VIEW)) == MemberStep(state)

    def test_and_forgets_what_it_has_settled(self) -> None:
        state = replace(
            promising(6),
            joining={CARA: ASKED, DORA: ASKED},
            losses={CARA: "closed", DORA: "closed"},
        )
        after = told(state, ANNA, commit(self.VIEW)).state
        assert after.joining == {DORA: ASKED}
        assert after.losses == {CARA: "closed"}

    @pytest.mark.parametrize(
        ("sender", "message", "why"),
        [
            pytest.param(ANNA, commit(make_view(6, ANNA, CARA)), "leaves out", id="without us"),
            pytest.param(ANNA, Commit(VIEW, ()), "costs do not fit", id="without costs"),
            pytest.param(ANNA, Commit(VIEW, ((0, 0, 0),) * 2), "do not fit", id="a row missing"),
            pytest.param(
                ANNA,
                commit(make_view(6, BERT, ANNA, CARA, leader=ANNA)),
                "ring does not follow",
                id="in another ring order",
            ),
        ],
    )
    def test_with_a_protocol_error_if_no_honest_leader_would_send_it(
        self, sender: Member, message: Commit, why: str
    ) -> None:
        with pytest.raises(ProtocolError, match=why):
            told(promising(6), sender, message)


def test_an_epoch_that_could_not_follow_is_never_installed() -> None:
    """I2, even if what was promised were forged: the last line of defence."""
    view = make_view(6, ANNA, CARA)
    state = replace(promising(6), view=make_view(4, ANNA, BERT))
    with pytest.raises(ProtocolError, match="a view that can't follow"):
        told(told(state, ANNA, TellView(view)).state, ANNA, make_heartbeat(view, BERT))
    same = replace(promising(6), view=make_view(6, *TRIO.members))
    with pytest.raises(ProtocolError, match="a view that can't follow"):
        told(same, ANNA, commit(same.view))
