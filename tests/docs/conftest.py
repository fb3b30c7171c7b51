from collections.abc import Iterator

import pytest

from tests.e2e.harness import Fleet


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet
