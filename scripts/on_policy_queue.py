"""A queue between actors and an on-policy learner, and a table that holds the newest policy.

The actors fetch the newest policy before each rollout. The queue hands every rollout to the learner
exactly once, in order, and holds the actors back while it is full, so that they do not run ahead of
the policy. The task is small enough to learn in seconds: in each of four states, one of two actions
gives a reward.

    python scripts/on_policy_queue.py --updates 60
"""

from __future__ import annotations

import argparse
import multiprocessing
from typing import Any

import numpy as np
import numpy.typing as npt

import shmreplay as reverb

ACTORS = 2
ROLLOUT = 20  # steps
BATCH = 4  # rollouts an update
LEARNING_RATE = 1.0
STATES, ACTIONS = 4, 2

SERVER_GONE = (reverb.errors.ServerClosedError, reverb.errors.StoreNotFoundError)

Array = npt.NDArray[Any]


def make_server() -> reverb.Server:
    """Serves the queue of rollouts, and the policy in a table that keeps only the newest item."""
    rollout = {
        "state": reverb.TensorSpec((ROLLOUT,), np.int32),
        "action": reverb.TensorSpec((ROLLOUT,), np.int32),
        "reward": reverb.TensorSpec((ROLLOUT,), np.float32),
        "version": reverb.TensorSpec((), np.int32),
    }
    policy = reverb.Table(
        "policy",
        sampler=reverb.selectors.Lifo(),
        remover=reverb.selectors.Fifo(),
        max_size=1,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    queue = reverb.Table.queue("rollouts", max_size=2 * BATCH, signature=rollout)
    return reverb.Server([queue, policy], capacity=64 << 20)


def probabilities(logits: Array) -> Array:
    """Softmax over the last axis."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def run_actor(address: str, seed: int) -> None:
    """Plays rollouts until the server is gone."""
    random = np.random.default_rng(seed)
    with reverb.Client(address) as client:
        try:
            writer = client.trajectory_writer(num_keep_alive_refs=ROLLOUT)
            while True:
                policy = client.sample_batch("policy", 1).data
                play_rollout(
                    writer, probabilities(policy["logits"][0, 0]), policy["version"][0], random
                )
        except SERVER_GONE:
            return


def play_rollout(
    writer: reverb.TrajectoryWriter, policy: Array, version: Array, random: np.random.Generator
) -> None:
    """Writes one rollout, and waits until the queue has taken it."""
    for _ in range(ROLLOUT):
        state = np.int32(random.integers(STATES))
        action = np.int32(random.random() < policy[state, 1])
        reward = np.float32(action == state % 2)
        writer.append({"state": state, "action": action, "reward": reward, "version": version[0]})
    history = writer.history
    writer.create_item(
        "rollouts",
        priority=1.0,
        trajectory={
            "state": history["state"][:],
            "action": history["action"][:],
            "reward": history["reward"][:],
            "version": history["version"][-1],
        },
    )
    writer.end_episode()


def learn(client: reverb.Client, updates: int) -> None:
    """Improves the policy by REINFORCE, each rollout used once."""
    logits = np.zeros((STATES, ACTIONS))
    oldest = 0
    for version in range(updates):
        client.insert({"logits": logits, "version": np.int32(version)}, {"policy": 1.0})
        rollouts = client.sample_batch("rollouts", BATCH).data
        oldest = max(oldest, version - int(rollouts["version"].min()))
        state, action = rollouts["state"].ravel(), rollouts["action"].ravel()
        reward = rollouts["reward"].ravel()
        gradient = np.zeros_like(logits)
        taken = np.eye(ACTIONS)[action] - probabilities(logits)[state]
        np.add.at(gradient, state, taken * (reward - reward.mean())[:, None])
        logits += LEARNING_RATE * gradient / BATCH
        if version % 10 == 9:
            print(f"update {version + 1}: mean reward {reward.mean():.2f}")
    print(f"oldest policy that a rollout was made with: {oldest} updates back")


def main() -> None:
    """Runs actors and learner."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--updates", type=int, default=60)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with make_server() as server:
        actors = [
            context.Process(target=run_actor, args=(server.address, seed)) for seed in range(ACTORS)
        ]
        for actor in actors:
            actor.start()
        with reverb.Client(server.address) as client:
            learn(client, arguments.updates)
    for actor in actors:
        actor.join()


if __name__ == "__main__":
    main()
