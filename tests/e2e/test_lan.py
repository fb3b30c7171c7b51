"""Machines on a network of their own, which nobody has introduced to each other."""

import json
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.e2e.harness import Fleet
from tools.lab.net import NetLab

pytestmark = pytest.mark.netns

TRAINER = """
import hashlib, importlib.util, json, pathlib
import numpy as np
import pmesh

# scikit-learn's digits, without the two seconds that its import takes.
package = pathlib.Path(importlib.util.find_spec("sklearn").origin).parent
digits = np.loadtxt(package / "datasets" / "data" / "digits.csv.gz", delimiter=",")
pixels, labels = (digits[:, :64] / 16).astype(np.float32), digits[:, 64].astype(int)
test_pixels, test_labels = pixels[-360:], labels[-360:]

with pmesh.connect(job="digits", wait_for=4) as mesh:
    rng = np.random.default_rng(mesh.rank)
    weights = {"w": rng.normal(0, 0.1, (64, 10)).astype(np.float32), "b": np.zeros(10, np.float32)}
    weights = mesh.broadcast(weights)
    mine = np.arange(len(labels) - 360)[mesh.rank :: mesh.size]
    for step in range(120):
        batch = rng.choice(mine, 32, replace=False)
        logits = pixels[batch] @ weights["w"] + weights["b"]
        chance = np.exp(logits - logits.max(axis=1, keepdims=True))
        chance /= chance.sum(axis=1, keepdims=True)
        chance[np.arange(len(batch)), labels[batch]] -= 1
        grads = {"w": pixels[batch].T @ chance / len(batch), "b": chance.mean(axis=0)}
        grads = mesh.average_gradients(grads, weight=len(batch))
        weights = {name: weights[name] - np.float32(0.5) * grads[name] for name in weights}
    right = (test_pixels @ weights["w"] + weights["b"]).argmax(axis=1) == test_labels
    digest = hashlib.sha256(weights["w"].tobytes() + weights["b"].tobytes()).hexdigest()
    print(json.dumps({"rank": mesh.rank, "names": mesh.names, "hash": digest,
                      "accuracy": right.mean(), "op": mesh.last_op.op}))
"""


def test_four_agents_that_find_each_other_by_mdns_train_one_model(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    lab = make_lab(4)
    names = [f"mac-{host.number}" for host in lab.hosts]
    agents = [fleet.start_agent(n, host=h) for n, h in zip(names, lab.hosts, strict=True)]
    fleet.await_view(*agents)
    for agent, host in zip(agents, lab.hosts, strict=True):
        assert host.ipv4 in {a.rpartition(":")[0] for a in agent.status().node.addresses}

    trainers = [fleet.start_trainer(agent, TRAINER) for agent in agents]
    results = [json.loads(t.await_line(r"^\{.*\}$")[0]) for t in trainers]
    for trainer in trainers:
        trainer.await_end()

    assert sorted(result["rank"] for result in results) == [0, 1, 2, 3]
    assert all(sorted(result["names"]) == names for result in results)
    assert len({result["hash"] for result in results}) == 1
    assert {result["op"] for result in results} == {120}
    assert min(result["accuracy"] for result in results) > 0.85
    for agent in agents:
        assert all(peer.state == "linked" for peer in agent.status().peers)


def test_a_second_agent_and_the_first_agree_on_a_view_of_two(
    fleet: Fleet, make_lab: Callable[[int], NetLab]
) -> None:
    lab = make_lab(2)
    first = fleet.start_agent("mac-1", host=lab.hosts[0])
    first.await_status(lambda _: True)

    began = time.monotonic()
    second = fleet.start_agent("mac-2", host=lab.hosts[1])
    second.process.await_line("mac-2 is up")
    up = time.monotonic()
    second.process.await_line("^ring: .*mac-2 ")
    agreed = time.monotonic()
    first.process.await_line("mac-2 joined")

    fleet.await_view(first, second)
    # Measured, not asserted: this machine may be busy. The issue asks for less than 2 s.
    print(f"second agent: up after {up - began:.2f} s, in a view of two {agreed - up:.2f} s later")  # noqa: T201


LOSSY = """
import sys, trio
from pmesh.net.links.path import loss_of

async def receive():
    (listener,) = await trio.open_tcp_listeners(5000, host="0.0.0.0")
    print("ready", flush=True)
    async for _ in await listener.accept():
        pass

async def send():
    stream = await trio.open_tcp_stream(sys.argv[1], 5000)
    await stream.send_all(bytes(1 << 25))
    print(loss_of(stream))

trio.run(send if len(sys.argv) > 1 else receive)
"""


def test_what_a_network_loses_is_counted_at_the_sender(make_lab: Callable[[int], NetLab]) -> None:
    lab = make_lab(2)
    one, two = lab.hosts
    with two.popen([sys.executable, "-c", LOSSY], stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        lab.lose(5)
        loss = float(one.run([sys.executable, "-c", LOSSY, two.ipv4]))
    assert 0.005 < loss < 0.5
