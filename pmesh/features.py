"""The features of an agent. Nothing else knows which there are."""

import secrets
from collections.abc import Sequence

from pmesh.agent.features import AnyFeature, Kernel
from pmesh.charts.agent import Charts
from pmesh.core.wire.link import PROTOCOL_VERSION
from pmesh.ids import path_name
from pmesh.invites.agent import Invites
from pmesh.invites.wire import Party
from pmesh.launches.agent.router import Launches
from pmesh.launches.agent.sessions import LaunchFeature
from pmesh.members.agent import Members
from pmesh.p2p.agent.router import P2PRouter
from pmesh.store.agent.stores import Stores
from pmesh.traces.agent import Traces


def make_features(kernel: Kernel) -> Sequence[AnyFeature]:
    """Make all features of one agent."""
    me, peers, jobs = kernel.me, kernel.peers, kernel.jobs
    launches = Launches(
        me,
        kernel.settings.name,
        home=kernel.settings.home,
        allow_run=kernel.settings.allow_run,
        names=kernel.names,
        view=lambda: jobs.membership.view,
        links=lambda: peers.links,
        nursery=kernel.nursery,
        noticed=kernel.noticed,
        contain=kernel.contain,
        launch_ids=lambda: path_name(secrets.token_hex(6)),
    )
    stores = Stores(me, jobs.ranks, peers.reach.send, peers.ban)
    p2p = P2PRouter(
        me,
        jobs.ranks,
        jobs.rendezvous,
        peers.reach.send,
        stores=stores,
        admission=kernel.admission,
        note=jobs.ended_ops.append,
    )
    invites = Invites(
        Party(me.node, kernel.settings.name, PROTOCOL_VERSION),
        kernel.mesh_key,
        advertise=kernel.advertise_invitation,
        is_removed=lambda node: kernel.register.removal_of(node) is not None,
        admission=kernel.admission,
        noticed=kernel.noticed,
    )
    launching = LaunchFeature(launches, kernel.admission)
    return p2p, stores, launching, invites, Members(kernel), Traces(kernel), Charts(kernel)
