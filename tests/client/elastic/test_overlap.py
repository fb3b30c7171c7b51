"""What counts as computing beside ops."""

from pmesh.client.elastic.place import Overlap


def test_a_rank_that_waits_for_each_op_computes_beside_none() -> None:
    overlap = Overlap()
    for now, own_s in ((1.0, 1.0), (5.0, 2.0)):
        overlap.begin(now, own_s)
        overlap.end()
    assert overlap.seconds == 0.0


def test_a_rank_computes_beside_its_ops_until_it_has_called_the_last() -> None:
    overlap = Overlap()
    overlap.begin(1.0, 1.0)
    overlap.begin(2.0, 1.0)
    overlap.end()
    overlap.begin(4.0, 1.5)  # between two ops the session was idle for half a second
    overlap.end()
    assert overlap.seconds == 0.0
    overlap.end()
    assert overlap.seconds == 2.5
    overlap.begin(9.0, 3.0)
    overlap.end()
    assert overlap.seconds == 2.5
