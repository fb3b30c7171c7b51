"""A name is what its node has signed, for one process start, and nothing else."""

import msgspec
import pytest
from hypothesis import given

from pmesh.core.identity.keys import NodeKey
from pmesh.core.identity.names import check_name_untrusted, claims_of, sign_name
from pmesh.core.values import SignedName
from pmesh.core.wire.views import AgreementMessage, Commit, Superseded, TellView
from pmesh.errors import ProtocolError
from pmesh.ids import Incarnation, Member
from tests.worlds.builders import (
    ANNA,
    BERT,
    CARA,
    DORA,
    make_flushed,
    make_heartbeat,
    make_proposal,
    make_roster,
    make_trainer,
    make_view,
    said_by,
)
from tests.worlds.strategies import values_of

KEY, OTHER_KEY = NodeKey.from_seed(b"k" * 32), NodeKey.from_seed(b"o" * 32)
ME = Member(KEY.node, Incarnation(7))
SAID = sign_name(KEY, ME, "studio")


def test_a_name_that_the_node_has_signed_is_taken() -> None:
    check_name_untrusted(ME, SAID)


@pytest.mark.parametrize(
    ("member", "said"),
    [
        pytest.param(ME, SignedName("mac", SAID.signature), id="another name"),
        pytest.param(ME, SignedName("studio", bytes(64)), id="no signature"),
        pytest.param(Member(KEY.node, Incarnation(8)), SAID, id="another incarnation"),
        pytest.param(Member(OTHER_KEY.node, ME.incarnation), SAID, id="another node"),
        pytest.param(Member(ANNA.node, ME.incarnation), SAID, id="a node that is no key"),
        pytest.param(ME, SignedName("studio", KEY.sign(b"studio")), id="another context"),
        pytest.param(
            ME,
            SignedName("studio", KEY.sign(KEY.node + bytes([0] * 7 + [7]) + b"studio")),
            id="the same bytes without the context",
        ),
    ],
)
def test_what_the_node_has_not_signed_as_its_name_now_is_refused(
    member: Member, said: SignedName
) -> None:
    for _ in range(2):  # what is remembered are good ones
        with pytest.raises(ProtocolError, match="a name that its machine has not signed"):
            check_name_untrusted(member, said)


@given(values_of(SignedName))
def test_anything_else_raises_a_protocol_error(said: SignedName) -> None:
    with pytest.raises(ProtocolError):
        check_name_untrusted(ME, said)


def test_a_node_signs_only_its_own_name() -> None:
    with pytest.raises(ValueError, match="signed by the node that it names"):
        sign_name(OTHER_KEY, ME, "studio")


VIEW = make_view(
    5, ANNA, BERT, rosters=[make_roster(ANNA, CARA, lost_holders=[make_trainer(9, DORA)])]
)
IN_VIEW = {(member, said_by(member)) for member in (ANNA, BERT, CARA, DORA)}


@pytest.mark.parametrize(
    "message",
    [
        TellView(VIEW),
        Superseded(VIEW),
        Commit(VIEW, ()),
        make_proposal(ANNA, 9, VIEW, ANNA, BERT),
        make_flushed(ANNA, VIEW),
    ],
    ids=lambda message: type(message).__name__,
)
def test_each_seat_and_each_rank_of_a_view_is_a_claim(message: AgreementMessage) -> None:
    assert claims_of(ANNA, message) == IN_VIEW


def test_a_flush_answer_claims_the_name_of_its_sender() -> None:
    renamed = msgspec.structs.replace(make_flushed(ANNA, VIEW), said=SAID)
    assert claims_of(ANNA, renamed) == {*IN_VIEW, (ANNA, SAID)}


def test_a_heartbeat_names_nobody() -> None:
    assert not claims_of(ANNA, make_heartbeat(VIEW, BERT))
