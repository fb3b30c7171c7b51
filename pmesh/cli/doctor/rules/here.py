"""Judges this machine: its home, its keys, its settings, its port and its agent."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pmesh.agent.host_port import next_to
from pmesh.cli.doctor.rules.findings import Finding, cause, cause_of, remark, well


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeFacts:
    """The home directory."""

    path: str
    exists: bool = True
    error: str = ""
    """Why no agent takes it as its home, with what to do; empty if one does."""


def judge_home(facts: HomeFacts) -> Iterator[Finding]:
    if facts.error:
        yield cause_of(facts.error, means="No agent starts with this home.")
    elif not facts.exists:
        yield cause(
            f"there is no home directory {facts.path}",
            means="pmesh has not run here yet, or has another home.",
            todo="pmesh up, or pmesh doctor --home PATH",
        )
    else:
        yield well(f"only you can enter {facts.path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFacts:
    """What config.toml and the variables say."""

    error: str = ""
    """Why no agent starts with them, with what to do; empty if one does."""


def judge_settings(facts: SettingsFacts) -> Iterator[Finding]:
    if facts.error:
        yield cause_of(facts.error, means="No agent starts with this setting.")
    else:
        yield well("config.toml and the PMESH_ variables are valid")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFacts:
    """The mesh key, and the key of this machine."""

    source: str
    """Where the mesh key is, or would be."""
    present: bool = True
    error: str = ""
    """Why one of the keys can't be used, with what to do; empty if both can."""
    agent_runs: bool = True


def judge_key(facts: KeyFacts) -> Iterator[Finding]:
    if facts.error:
        then = "The agent that runs does not start again." if facts.agent_runs else ""
        yield cause_of(facts.error, means=then or "No agent starts with this key.")
    elif facts.present:
        yield well(f"the mesh key is in {facts.source}, and nobody else can read it")
    elif facts.agent_runs:
        yield well("the agent was given its mesh key by PMESH_KEY or --key-file; here is none")
    else:
        yield cause(
            f"there is no mesh key in {facts.source}",
            means="'pmesh up' would make a new one, and with it another mesh.",
            todo="pmesh join CODE, with what 'pmesh invite' shows on another machine; "
            "on the first machine: pmesh up",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPackage:
    """A distribution that brings a package named pmesh, and is not this one."""

    name: str
    version: str
    summary: str
    folder: str


def judge_packages(others: Sequence[OtherPackage]) -> Iterator[Finding]:
    for other in others:
        yield cause(
            f"{other.name} {other.version} in {other.folder} also has a package named pmesh "
            f"({other.summary or 'it does not say what it is'})",
            means="'import pmesh' may load that one, or a mixture of both.",
            todo=f"pip uninstall {other.name} pmesh-agent, and then install pmesh-agent again",
        )
    if not others:
        yield well("no other package is named pmesh")


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """The port at which the agent listens, or would."""

    port: int
    host: str = ""
    """The address at which the agent would listen; empty for all of this machine."""
    holder: Literal["agent", "nobody", "other"]
    program: str = ""
    """Which other program holds it; empty if that is not known."""
    error: str = ""
    """Why no agent can listen at that address, with what to do; empty if one can."""


def judge_port(facts: PortFacts) -> Iterator[Finding]:
    if facts.error:
        yield cause_of(facts.error, means="The agent can't start.")
    elif facts.holder == "agent":
        yield well(f"the agent listens at port {facts.port}")
    elif facts.holder == "nobody":
        yield well(f"port {facts.port} is free")
    else:
        another = next_to(facts.host, facts.port)
        yield cause(
            f"port {facts.port} is held by {facts.program or 'a program of another user'}",
            means="The agent can't start; it may be an agent with another home.",
            todo=f"stop that program, or take another port: pmesh up --listen {another}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """The agent of this home."""

    state: Literal["answers", "not running", "in trouble"]
    error: str = ""
    """Of one in trouble, with what to do."""
    socket_left: bool = False
    """There is a socket at which nobody listens."""
    pid: int = 0


def judge_agent(facts: AgentFacts) -> Iterator[Finding]:
    if facts.state == "answers":
        yield well(f"the agent answers (pid {facts.pid})")
    elif facts.state == "in trouble":
        yield cause_of(facts.error, means="Commands and scripts of this machine wait, or fail.")
    else:
        left = "; one that was killed has left its socket" if facts.socket_left else ""
        yield cause(
            f"no agent runs with this home{left}",
            means="This machine is in no mesh.",
            todo="pmesh up, or in the background: pmesh up --detach",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """Of this command, and of the agent that answered it."""

    command: tuple[str, int]
    """The version of pmesh, and of the protocol."""
    agent: tuple[str, int]


def judge_versions(facts: VersionFacts) -> Iterator[Finding]:
    (ours, protocol), (theirs, its_protocol) = facts.command, facts.agent
    again = "pmesh down, and then pmesh up"
    if protocol != its_protocol:
        yield cause(
            f"the agent speaks protocol {its_protocol}, the installed pmesh {protocol}",
            means="The agent was started before pmesh was updated; it can't link with new ones.",
            todo=again,
        )
    elif ours != theirs:
        yield remark(
            f"the agent is pmesh {theirs}, installed is {ours}",
            means="The agent was started before pmesh was updated.",
            todo=again,
        )
    else:
        yield well(f"agent and command are pmesh {ours}, protocol {protocol}")
