"""What is done to `pmesh run --on`, and what must hold then."""

from functools import partial

from tools.lab.campaign import Campaign, nothing_violated, within
from tools.launches.kills import BLOWS, run_blows
from tools.launches.output import run_flood, run_terminals

# fmt: off
CAMPAIGNS = (
    *(
        Campaign(blow.name, f"{blow.what}, --engine {blow.engine}", partial(run_blows, case=blow),
                 blow.bar, within(blow.ends_s), 50, 1, one_size=True)
        for blow in BLOWS
    ),
    Campaign("flood", "four machines print 10,000 lines a second each through `pmesh run`",
             run_flood, "no line lost, torn or out of order", nothing_violated, 20, 2,
             one_size=True),
    Campaign("terminals", "ranks print behind terminals that read all, little, and nothing",
             run_terminals, "none", nothing_violated, 3, 1, one_size=True),
)
# fmt: on
