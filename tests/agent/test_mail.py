"""O4: letters between two ranks, over real agents, while views come and go."""

import numpy as np
from trio.testing import MockClock

from tests.agent.fakes import village
from tests.agent.letters import attach
from tests.agent.ops import machine_of


async def test_a_letter_brings_its_values_shape_and_dtype(clock: MockClock) -> None:
    async with village(clock, 2) as here:
        a, b = await here.job(*here.machines)
        one = await attach(here, machine_of(here, a), a)
        other = await attach(here, machine_of(here, b), b)
        values = np.arange(6.0).reshape(2, 3)

        sent = await one.begin_send(other.id, values, tag=5)
        got = await other.receive(one.id, tag=5)

        assert await one.end(sent) is None
        np.testing.assert_array_equal(got.values, values)
        assert (got.source, got.letter.dtype, got.letter.shape) == (one.id, "float64", (2, 3))
