"""Which trainings ranks are killed in, and what must hold then."""

from functools import partial

from tools.kills.calls import run_calls
from tools.kills.fewer import run_stages_for_good
from tools.kills.launched import run_launched
from tools.kills.maps import SPEEDS, USED, run_maps
from tools.kills.stages import run_stages
from tools.kills.workloads import run_elastic, run_fixed, run_lora, run_trainer
from tools.lab.campaign import Campaign, fact_at_least, nothing_violated

COME_BACK = ("the same bits at all ranks, loss within 1 %", nothing_violated)
SAME_ERROR = ("the same error at all survivors ≤ 2.5 s", nothing_violated)

# fmt: off
CAMPAIGNS = (
    Campaign("elastic", "kill -9 of ranks of pmesh.torch's elastic DDP, which come back",
             run_elastic, *COME_BACK, 50, 2, one_size=True),
    Campaign("elastic-trainer", "kill -9 of ranks of pmesh.torch.ElasticTrainer, which come back",
             run_trainer, *COME_BACK, 20, 2, one_size=True),
    Campaign("ddp", "kill -9 of a rank of torch's own DDP, which ends the training",
             partial(run_fixed, kind="ddp"), *SAME_ERROR, 50, 2, one_size=True),
    Campaign("fsdp", "kill -9 of a rank of torch's own FSDP2, which ends the training",
             partial(run_fixed, kind="fsdp"), *SAME_ERROR, 50, 2, one_size=True),
    Campaign("lora", "kill -9 of ranks of pmesh mlx -- mlx_lm.lora --train, which come back",
             run_lora, *COME_BACK, 50, 1, one_size=True),
    Campaign("stages", "kill -9 of ranks, agents and machines of pmesh.mlx's ElasticPipeline",
             run_stages, "losses and weights bit for bit those of a training without kills",
             nothing_violated, 100, 2, one_size=True),
    Campaign("stages-for-good", "kill -9 of ranks, agents and machines of ElasticPipeline, which "
             "stay away, from 4 stages down to 2", run_stages_for_good,
             "losses and weights bit for bit those of a training without kills",
             nothing_violated, 20, 2, one_size=True),
    Campaign("trainer-kills", "kill -9 of ranks, agents and machines under Transformers' Trainer, "
             "Lightning's and torch's own DDP", run_launched,
             "the same bits at all ranks, weights within 1e-5, loss within 1 %", nothing_violated,
             50, 1, one_size=True),
    Campaign("call-kills", "kill -9 of ranks and agents, with 1,000 calls and objects of mesh.rpc "
             "under way among eight ranks", run_calls,
             "every call ends, runs at most once; no object, thread or arena left",
             nothing_violated, 100, one_size=True),
    Campaign("map-kills", f"kill -9 of ranks of machines with speeds of {SPEEDS}, which share 20 "
             "items for each kill by mesh.rpc.map", run_maps,
             "each result used once; 0.9 of the sum of their rates", fact_at_least(USED, 0.9),
             20, 1, one_size=True),
)
# fmt: on
