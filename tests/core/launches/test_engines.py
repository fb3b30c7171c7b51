"""The environment that scripts of torchrun and mlx.launch expect."""

import json

from pmesh.core.launches.engines import Place, Run, parts_of, unreachable
from pmesh.core.wire.launches import Engine
from pmesh.ids import NodeId

A, B = (NodeId(bytes([n]) * 32) for n in (1, 2))
PLACES = [
    Place(node=A, ranks=(0, 1), ports=(7000, 7001, 7002, 7003), ways={B: ("10.0.0.2", "en5")}),
    Place(node=B, ranks=(2,), ports=(8000, 8001), ways={A: ("10.0.0.1", "en1")}),
]


def run(engine: Engine) -> Run:
    return Run(
        engine=engine, job="digits", launch="ab" * 6, generation=2, restarts=5, places=PLACES
    )


def variables(engine: Engine, node: NodeId, index: int = 0) -> dict[str, str]:
    return dict(parts_of(run(engine), node)[index].variables)


def test_pmesh_needs_the_job_and_its_size() -> None:
    assert variables("pmesh", B) == {"PMESH_JOB": "digits", "PMESH_WAIT_FOR": "3"}


def test_torch_finds_what_torchrun_sets() -> None:
    assert variables("gloo", A, 1) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "7000",
        "TORCHELASTIC_RUN_ID": "ab" * 6,
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "GLOO_SOCKET_IFNAME": "en5",
        "NCCL_SOCKET_IFNAME": "en5",
    }
    assert variables("nccl", B)["MASTER_ADDR"] == "10.0.0.1"


def test_one_machine_needs_no_interface() -> None:
    alone = Run(engine="gloo", job="", launch="", generation=0, restarts=0, places=PLACES[:1])
    assert "GLOO_SOCKET_IFNAME" not in dict(parts_of(alone, A)[0].variables)


def test_each_rank_of_an_mlx_ring_listens_where_the_one_before_reaches_it() -> None:
    (part,) = parts_of(run("mlx-ring"), B)
    assert dict(part.variables) == {"MLX_RANK": "2"}
    hosts = json.loads(dict(part.files)["MLX_HOSTFILE"])
    assert hosts == [["10.0.0.1:7000"], ["127.0.0.1:7001"], ["10.0.0.2:8000"]]


def test_jaccl_gets_the_devices_between_every_two_ranks() -> None:
    (part,) = parts_of(run("jaccl"), B)
    assert dict(part.variables) == {"MLX_RANK": "2", "MLX_JACCL_COORDINATOR": "10.0.0.1:7000"}
    devices = json.loads(dict(part.files)["MLX_IBV_DEVICES"])
    assert devices == [
        [None, None, "rdma_en5"],
        [None, None, "rdma_en5"],
        ["rdma_en1", "rdma_en1", None],
    ]


def test_neighbours_without_an_address_are_named() -> None:
    apart = [PLACES[0], Place(node=B, ranks=(2,), ports=(8000, 8001), ways={})]
    assert unreachable("gloo", apart) == (B, A)
    assert unreachable("gloo", PLACES) is None
    assert unreachable("pmesh", apart) is None
