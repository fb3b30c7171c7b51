"""The environment that scripts of torchrun and mlx.launch expect, and who can change it."""

import json
import types
from collections.abc import Iterator
from typing import get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pmesh.core.wire.channels import encode
from pmesh.errors import ProtocolError, UsageError
from pmesh.ids import JobName, NodeId, path_name
from pmesh.launches.rules.engines import (
    MAX_RDMA_RANKS,
    LaunchPlace,
    Settings,
    begin_messages,
    environment_of,
    ranks_untrusted,
    settings_of,
    unreachable,
    why_not_set,
)
from pmesh.launches.wire.engines import Engine
from pmesh.launches.wire.messages import (
    AnyLaunchMessage,
    BeginRanks,
    Command,
    LaunchTerms,
    PrepareLaunch,
    RankGroup,
    Variable,
)
from simulation.wire import decode_untrusted, encode_unbounded

A, B = (NodeId(bytes([n]) * 32) for n in (1, 2))
LAUNCH = path_name("ab" * 6)
PLACES = [
    LaunchPlace(
        node=A, ranks=(0, 1), ports=(7000, 7001, 7002, 7003), ways={B: ("10.0.0.2", "en5")}
    ),
    LaunchPlace(node=B, ranks=(2,), ports=(8000, 8001), ways={A: ("10.0.0.1", "en1")}),
]
ENGINES: tuple[Engine, ...] = get_args(Engine)


def question(engine: Engine, ranks: int) -> PrepareLaunch:
    return PrepareLaunch(
        launch=LAUNCH,
        job=JobName("digits"),
        command=Command(("true",), "/"),
        terms=LaunchTerms(engine=engine, restarts=5),
        seat=0,
        nodes=(A, B),
        names=("a", "b"),
        ranks=ranks,
    )


def settings(
    engine: Engine, node: NodeId, index: int = 0, places: list[LaunchPlace] = PLACES
) -> Settings:
    """What a rank finds, after its machine has read the message."""
    sent = begin_messages(LAUNCH, 2, places)[node]
    begin = decode_untrusted(encode(sent))
    assert isinstance(begin, BeginRanks)
    (place,) = (place for place in places if place.node == node)
    prepare = question(engine, len(place.ranks))
    ranks = ranks_untrusted(prepare, begin)
    assert tuple(ranks) == tuple(place.ranks)
    return settings_of(prepare, begin, ranks[index])


def test_pmesh_needs_the_job_its_size_and_what_torch_finds() -> None:
    for index, place in enumerate(("0", "1")):
        ours = {"PMESH_JOB": "digits", "PMESH_WAIT_FOR": "3", "PMESH_PLACE": place}
        assert settings("pmesh", A, index) == ({**settings("gloo", A, index).variables, **ours}, {})


def test_pmesh_says_that_it_answers_for_other_backends() -> None:
    asked = replace(question("pmesh", 1), terms=LaunchTerms(backend="pmesh"))
    found = settings_of(asked, BeginRanks(LAUNCH, 0, 0, (RankGroup(1),)), 0)
    assert found.variables["PMESH_BACKEND"] == "pmesh"


def test_pmesh_does_without_addresses() -> None:
    apart = [PLACES[0], LaunchPlace(node=B, ranks=(2,), ports=(8000,), ways={})]
    found = settings("pmesh", B, places=apart).variables
    assert found["RANK"] == "2"
    assert not {"MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"} & found.keys()
    begin = BeginRanks(LAUNCH, 0, 0, (RankGroup(1),))  # as from an older version
    assert settings_of(question("pmesh", 1), begin, 0).variables["WORLD_SIZE"] == "1"


def test_torch_finds_what_torchrun_sets() -> None:
    assert settings("gloo", A, 1).variables == {
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
    assert settings("nccl", B).variables["MASTER_ADDR"] == "10.0.0.1"


def test_one_machine_needs_no_interface() -> None:
    assert "GLOO_SOCKET_IFNAME" not in settings("gloo", A, places=PLACES[:1]).variables


def test_each_rank_of_an_mlx_ring_listens_where_the_one_before_reaches_it() -> None:
    variables, files = settings("mlx-ring", B)
    assert variables == {"MLX_RANK": "2"}
    hosts = json.loads(files["MLX_HOSTFILE"])
    assert hosts == [["10.0.0.1:7000"], ["127.0.0.1:7001"], ["10.0.0.2:8000"]]


def test_jaccl_gets_the_devices_between_every_two_ranks() -> None:
    variables, files = settings("jaccl", B)
    assert variables == {"MLX_RANK": "2", "MLX_JACCL_COORDINATOR": "10.0.0.1:7000"}
    devices = json.loads(files["MLX_IBV_DEVICES"])
    assert devices == [
        [None, None, "rdma_en5"],
        [None, None, "rdma_en5"],
        ["rdma_en1", "rdma_en1", None],
    ]


def test_neighbours_without_an_address_are_named() -> None:
    apart = [PLACES[0], LaunchPlace(node=B, ranks=(2,), ports=(8000, 8001), ways={})]
    assert unreachable("gloo", apart) == (B, A)
    assert unreachable("gloo", PLACES) is None
    assert unreachable("pmesh", apart) is None


# --- what a starter that lies can do


def test_a_message_that_brings_variables_to_ranks_is_refused() -> None:
    forged = [42, LAUNCH, 0, [[0, [["LD_PRELOAD", "x.so"], ["BASH_ENV", "x"]], []]]]
    with pytest.raises(ProtocolError):
        decode_untrusted(encode_unbounded(forged, BeginRanks.channel))


def test_only_the_command_brings_variables() -> None:
    """They are checked where an environment is made; a new message must not bring others."""
    seen = {kind for message in get_args(AnyLaunchMessage) for kind in _types_in(message)}
    seen.discard(Variable)
    bring = {kind for kind in seen if Variable in _types_in(kind, deep=False)}
    assert bring == {Command}


def _types_in(kind: object, *, deep: bool = True) -> Iterator[object]:
    """Yield a type, and all types of its fields."""
    hints = get_type_hints(kind) if isinstance(kind, type | types.FunctionType) else {}
    yield kind
    for hint in hints.values():
        for inner in _flat(hint):
            yield inner
            if deep and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                yield from _types_in(inner)


def _flat(hint: object) -> Iterator[object]:
    yield hint
    for argument in get_args(hint):
        yield from _flat(argument)


HOSTS = st.from_regex(r"([0-9]{1,3}\.){3}[0-9]{1,3}", fullmatch=True) | st.just("")
INTERFACES = st.from_regex(r"[A-Za-z0-9_.-]{0,15}", fullmatch=True)
GROUPS = st.builds(
    RankGroup,
    count=st.integers(1, 3),
    host=HOSTS,
    ports=st.lists(st.integers(1, 65535), max_size=3).map(tuple),
    interfaces=st.lists(INTERFACES, max_size=3).map(tuple),
)
BEGINS = st.builds(
    BeginRanks,
    launch=st.just(LAUNCH),
    generation=st.integers(0, 2**62),
    group=st.integers(0, 3),
    groups=st.lists(GROUPS, min_size=1, max_size=3).map(tuple),
    first_host=HOSTS,
)


@pytest.mark.parametrize("engine", ENGINES)
@given(data=st.data())
def test_whatever_a_starter_says_only_names_of_ours_are_set(
    engine: Engine, data: st.DataObject
) -> None:
    begin = data.draw(BEGINS)
    prepare = question(engine, data.draw(st.integers(1, 3)))
    try:
        ranks = ranks_untrusted(prepare, begin)
    except ProtocolError:
        return
    assert len(ranks) == prepare.ranks
    for rank in ranks:
        found = settings_of(prepare, begin, rank)
        assert not {*found.variables, *found.files} - NAMES[engine]
        texts = (*found.variables.values(), *found.files.values())
        assert all(text.isprintable() for text in texts)


_TORCH = frozenset({*settings("gloo", A).variables})
NAMES: dict[Engine, frozenset[str]] = {
    "pmesh": _TORCH | {"PMESH_JOB", "PMESH_WAIT_FOR", "PMESH_PLACE"},
    "gloo": _TORCH,
    "nccl": _TORCH,
    "mlx-ring": frozenset({"MLX_RANK", "MLX_HOSTFILE"}),
    "jaccl": frozenset({"MLX_RANK", "MLX_JACCL_COORDINATOR", "MLX_IBV_DEVICES"}),
}


GROUP = RankGroup(1, "10.0.0.1", (7000,), ("",))


@pytest.mark.parametrize(
    ("engine", "group", "groups"),
    [
        ("pmesh", 1, (GROUP,)),
        ("pmesh", 0, (RankGroup(2),)),
        ("pmesh", 0, (RankGroup(1), *(RankGroup(64),) * 16)),
        ("pmesh", 0, (GROUP, RankGroup(1))),
        ("gloo", 0, (RankGroup(1),)),
        ("gloo", 0, (RankGroup(1, "10.0.0.1", (7000,)),)),
        ("gloo", 0, (GROUP, GROUP)),
        ("jaccl", 0, (GROUP, RankGroup(MAX_RDMA_RANKS))),
    ],
)
def test_ranks_that_a_machine_can_not_have_are_refused(
    engine: Engine, group: int, groups: tuple[RankGroup, ...]
) -> None:
    with pytest.raises(ProtocolError):
        ranks_untrusted(question(engine, 1), BeginRanks(LAUNCH, 0, group, groups))


@pytest.mark.parametrize("host", ["mac-1.local", "10.0.0.1,evil", "::1", "10.0.0.1:1", "1.2.3"])
def test_a_host_that_is_no_address_is_refused(host: str) -> None:
    forged = BeginRanks(LAUNCH, 0, 0, (GROUP,), host)
    with pytest.raises(ProtocolError):
        decode_untrusted(encode(forged))


@pytest.mark.parametrize(
    "name",
    [
        *("LD_PRELOAD", "LD_AUDIT", "DYLD_INSERT_LIBRARIES", "GCONV_PATH", "GLIBC_TUNABLES"),
        *("BASH_ENV", "BASHOPTS", "ENV", "IFS", "PS4", "SHELLOPTS", "ZDOTDIR"),
        *("PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONEXECUTABLE", "__PYVENV_LAUNCHER__"),
        *("PMESH_HOME", "PMESH_KEY"),
    ],
)
def test_no_environment_is_made_with_what_may_not_be_set(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} may not be set"):
        environment_of({}, {}, [Variable("EPOCHS", "3"), Variable(name, "x")])


def test_what_programs_of_the_command_heed_may_be_set() -> None:
    names = ("PYTHONPATH", "PYTHONSTARTUP", "NODE_OPTIONS", "PERL5LIB", "PATH", "ld_preload")
    assert why_not_set(names) == ""


def test_what_was_asked_for_comes_last_and_the_agent_s_own_settings_never() -> None:
    inherited = {"PMESH_KEY": "secret", "A": "inherited", "B": "inherited", "C": "inherited"}
    own = {"PMESH_HOME": "/home/x", "B": "ours", "C": "ours"}
    assert environment_of(inherited, own, [Variable("C", "asked")]) == {
        "A": "inherited",
        "B": "ours",
        "C": "asked",
        "PMESH_HOME": "/home/x",
    }
