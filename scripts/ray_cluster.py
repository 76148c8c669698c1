"""Replay servers and actors on every node of a Ray cluster, and a learner that samples from all.

Each node gets one server, and the actors there write to it through shared memory: no step of theirs
crosses the network before it is sampled. The learner takes batches from all servers together over
their bridges, as if they were one: a `ShardedClient`. A server that dies is started again by Ray
and takes its store over, with all that it held; meanwhile its actors go on, and the learner goes on
with the other servers. The task is a random walk of nine states, whose values are known.

    pip install ray
    python scripts/ray_cluster.py                       # a cluster of two nodes on this machine
    python scripts/ray_cluster.py --address auto        # from a node of a cluster that runs
    python scripts/ray_cluster.py --kill                # kills a server half way

The bridges listen on all interfaces, so they demand keys; this program makes some and hands them to
the servers and to the learner. `--insecure` does without, on a network that is trusted.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import shmreplay as reverb
from shmreplay.bridge.auth import ClientKeys, ServerKeys, keygen

TABLE = "replay"
STATES = 9  # of the walk; it begins in the middle, and ends beyond either end
VALUES = np.arange(1, STATES + 1) / (STATES + 1)  # the right end gives a reward of 1
CORRECTION = 0.6  # exponent of the importance weights
LEARNING_RATE = 0.05
BATCH = 64
EPISODES = 20  # that an actor plays at a time

Keys = dict[str, str]
"""Texts of key files by name; none where there are to be no keys."""


class ReplayServer:
    """A node's server. Ray makes it anew with the same arguments if it dies."""

    def __init__(self, name: str, port: int, keys: Keys) -> None:
        self._home, folder = write_keys(keys)
        auth = None
        if keys:
            auth = ServerKeys(str(folder / "server.key_secret"), clients=str(folder))
        table = reverb.Table(
            TABLE,
            sampler=reverb.selectors.Prioritized(priority_exponent=0.8),
            remover=reverb.selectors.Fifo(),
            max_size=20_000,
            rate_limiter=reverb.rate_limiters.MinSize(200),
        )
        self._server = reverb.Server(
            [table],
            port=port,
            name=name,
            capacity=64 << 20,
            recover=True,
            bind="0.0.0.0",
            auth=auth,
            insecure=not keys,
        )

    def address(self) -> str:
        return f"tcp://{ray.util.get_node_ip_address()}:{self._server.port}"

    def stop(self) -> None:
        self._server.stop()
        self._home.cleanup()


class Actor:
    """Walks, and writes each step to the server of its node."""

    def __init__(self, store: str, seed: int) -> None:
        self._client = reverb.Client(store)
        self._random = np.random.default_rng(seed)

    def play(self, episodes: int) -> int:
        """Plays; gives the number of steps."""
        steps = 0
        with self._client.trajectory_writer(num_keep_alive_refs=1) as writer:
            for _ in range(episodes):
                state = STATES // 2
                while 0 <= state < STATES:
                    after = state + int(self._random.choice((-1, 1)))
                    writer.append(
                        {
                            "state": np.int32(state),
                            "after": np.int32(after),
                            "reward": np.float32(after == STATES),
                        }
                    )
                    step = {name: writer.history[name][-1] for name in ("state", "after", "reward")}
                    writer.create_item(TABLE, 1.0, step)
                    state, steps = after, steps + 1
                writer.end_episode()
        return steps


class Learner:
    """Learns the states' values from all servers."""

    def __init__(self, addresses: list[str], keys: Keys) -> None:
        self._home, folder = write_keys(keys)
        mine = None
        if keys:
            mine = ClientKeys(str(folder / "learner.key_secret"), str(folder / "server.key"))
        remote = reverb.RemoteOptions(timeout=3.0, keys=mine)
        self._client = reverb.ShardedClient(addresses, remote)
        # One value more at each end, of where the walk is over.
        self._values = np.full(STATES + 2, 0.5)
        self._values[[0, -1]] = 0.0
        self._sampled = np.zeros(len(addresses), np.int64)

    def learn(self, updates: int) -> float:
        """Learns; gives the root mean square error of the values."""
        values = self._values
        for _ in range(updates):
            info, step = self._client.sample_batch(TABLE, BATCH, timeout=60.0)
            weights = (info.table_size * info.probability) ** -CORRECTION
            state = step["state"] + 1
            error = step["reward"] + values[step["after"] + 1] - values[state]
            np.add.at(values, state, LEARNING_RATE * weights / weights.max() * error)
            self._client.update_priorities(TABLE, info.key, np.abs(error) + 0.01)
            self._sampled += np.bincount(info.key["shard"], minlength=len(self._sampled))
        return float(np.sqrt(np.mean((values[1:-1] - VALUES) ** 2)))

    def sampled(self) -> list[int]:
        """How many items came from each shard."""
        return [int(n) for n in self._sampled]

    def shards(self) -> list[Any]:
        return self._client.shards

    def close(self) -> None:
        self._client.close()
        self._home.cleanup()


def make_keys() -> tuple[Keys, Keys]:
    """What the servers need, and what the learner needs: pairs that nobody else has."""
    with tempfile.TemporaryDirectory() as home:
        for name in ("server", "learner"):
            keygen(home, name)
        texts = {path.name: path.read_text() for path in Path(home).iterdir()}
    servers = ("server.key_secret", "learner.key")
    learner = ("learner.key_secret", "server.key")
    return {name: texts[name] for name in servers}, {name: texts[name] for name in learner}


def write_keys(keys: Keys) -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """Writes key files on this node, into a directory that only this user may enter.

    It stays where its process is killed.
    """
    home = tempfile.TemporaryDirectory(prefix="shmreplay-keys-")
    for name, text in keys.items():
        with open(os.open(Path(home.name) / name, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(text)
    return home, Path(home.name)


def free_port() -> int:
    """A port of this node that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextmanager
def cluster(address: str | None, nodes: int, cpus: int) -> Iterator[list[str]]:
    """Joins a cluster, or makes one on this machine; gives the ids of its nodes."""
    if address is not None:
        ray.init(address=address)
        local = None
    else:
        from ray.cluster_utils import Cluster

        local = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus})
        for _ in range(nodes - 1):
            local.add_node(num_cpus=cpus)
        local.wait_for_nodes()
        ray.init(address=local.address)
    try:
        yield [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    finally:
        ray.shutdown()
        if local is not None:
            local.shutdown()


def on(node: str) -> dict[str, Any]:
    """Options by which Ray places something on a node, and nowhere else."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def start_server(number: int, node: str, keys: Keys) -> tuple[Any, str]:
    """A server on a node; also the address of its store there."""
    port = ray.get(ray.remote(free_port).options(num_cpus=0, **on(node)).remote())
    name = f"ray-{os.getpid()}-{number}"
    server = ray.remote(ReplayServer).options(num_cpus=0, max_restarts=-1, **on(node))
    return server.remote(name, port, keys), f"shm://{name}"


def play_while(actors: list[Any], learning: Any) -> tuple[int, Any]:
    """Has actors play until something is done; gives their steps, and its result."""
    playing = {actor.play.remote(EPISODES): actor for actor in actors}
    steps = 0
    while True:
        done, _ = ray.wait([learning, *playing], num_returns=1)
        for each in done:
            if each in playing:
                steps += ray.get(each)
                actor = playing.pop(each)
                playing[actor.play.remote(EPISODES)] = actor
        if learning in done:
            return steps + sum(ray.get(list(playing))), ray.get(learning)


def wait_for_all(learner: Any) -> None:
    """Waits until every shard is there again."""
    end = time.monotonic() + 60.0
    while not all(shard.up for shard in ray.get(learner.shards.remote())):
        if time.monotonic() > end:
            raise SystemExit("a server that was killed did not come back")
        time.sleep(0.1)


def run(nodes: list[str], options: argparse.Namespace) -> None:
    server_keys, learner_keys = ({}, {}) if options.insecure else make_keys()
    started = [start_server(i, node, server_keys) for i, node in enumerate(nodes)]
    servers = [server for server, _ in started]
    try:
        addresses = ray.get([server.address.remote() for server in servers])
        actors = [
            ray.remote(Actor).options(num_cpus=1, **on(node)).remote(store, 100 * i + j)
            for i, (node, (_, store)) in enumerate(zip(nodes, started, strict=True))
            for j in range(options.actors)
        ]
        learner = ray.remote(Learner).options(num_cpus=1).remote(addresses, learner_keys)
        print(f"{len(nodes)} nodes, {len(actors)} actors, servers at {', '.join(addresses)}")
        total = 0
        for part in range(2):
            steps, error = play_while(actors, learner.learn.remote(options.updates // 2))
            total += steps
            print(f"{total} steps written, error of the values: {error:.3f}")
            if options.kill and part == 0:
                ray.kill(servers[0], no_restart=False)
                steps, _ = play_while(actors, learner.learn.remote(20))
                total += steps
                wait_for_all(learner)
                print("a server was killed, and is back")
        print(f"sampled from each server: {ray.get(learner.sampled.remote())}")
        ray.get(learner.close.remote())
    finally:
        ray.get([server.stop.remote() for server in servers])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a cluster that runs, or 'auto'; else makes one")
    parser.add_argument("--nodes", type=int, default=2, help="of the cluster that is made")
    parser.add_argument("--actors", type=int, default=1, help="on each node")
    parser.add_argument("--updates", type=int, default=1000, help="that the learner makes")
    parser.add_argument("--kill", action="store_true", help="a server, half way")
    parser.add_argument(
        "--insecure", action="store_true", help="no keys: whoever reaches a node can read and write"
    )
    options = parser.parse_args()
    with cluster(options.address, options.nodes, options.actors + 1) as nodes:
        run(nodes, options)


if __name__ == "__main__":
    main()
