"""What runs over gloo gives the same over pmesh, in real processes."""

from typing import Any

import pytest
import torch

from tests.torch.scenarios import SAME

pytestmark = pytest.mark.slow
Found = dict[str, list[dict[str, Any]]]


@pytest.mark.parametrize("scenario", SAME)
def test_a_scenario_gives_what_gloo_gives(both: Found, scenario: str) -> None:
    for rank, (of_gloo, of_pmesh) in enumerate(zip(both["gloo"], both["pmesh"], strict=True)):
        if scenario == "objects":
            assert of_pmesh[scenario] == of_gloo[scenario]
            continue
        # Floats to a sum in another order: gloo adds in its own.
        torch.testing.assert_close(
            of_pmesh[scenario],
            of_gloo[scenario],
            rtol=1e-5,
            atol=1e-6,
            msg=lambda text, rank=rank: f"rank {rank}: {text}",
        )


@pytest.mark.parametrize("scenario", ["ddp", "ddp_unused", "zero"])
def test_all_ranks_have_the_same_bits(both: Found, scenario: str) -> None:
    first, *others = [found[scenario]["weights"] for found in both["pmesh"]]
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
