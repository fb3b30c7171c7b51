import pytest

from simulation import scale


def test_a_resting_mesh_sends_its_heartbeats_and_little_else() -> None:
    costs = scale.measure(3)
    others = 2
    assert 5 * others <= costs.messages_per_s < 6 * others
    assert 0 < costs.agreed_s < 1.0
    assert 0 < costs.leader_agreed_s < 1.0
    assert costs.commit_bytes > 0


def test_the_table_has_a_row_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(3, 4)
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head.count("|") == rule.count("|")
    assert [row.split("|")[1].strip() for row in rows] == ["3", "4"]
