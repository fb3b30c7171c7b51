"""How layers are given to stages."""

import pytest

from pmesh.errors import UsageError
from pmesh.mlx.pipeline.rules.splitting import check_counts, plan_split


def test_faster_stages_get_more_and_memory_limits_them() -> None:
    assert plan_split([1] * 12, [1] * 12, [1, 1, 2], [99] * 3) == [3, 3, 6]
    assert plan_split([1] * 12, [1] * 12, [1, 1, 2], [99, 99, 4]) == [4, 4, 4]
    assert plan_split([5, 1, 1, 1], [1] * 4, [1, 1], [9, 9]) == [1, 3]


def test_what_cannot_be_split_is_refused_with_its_numbers() -> None:
    with pytest.raises(
        UsageError, match=r"does not fit: training it takes 8\.0 GB .* 3\.0, 4\.0 GB"
    ):
        plan_split([1] * 4, [2 * 10**9] * 4, [1, 1], [3e9, 4e9])
    with pytest.raises(UsageError, match="2 layers, too few for 3 stages"):
        plan_split([1, 1], [1, 1], [1] * 3, [9] * 3)
    with pytest.raises(UsageError, match="each layer belongs to one stage"):
        check_counts([0, 4], 4, 2)
