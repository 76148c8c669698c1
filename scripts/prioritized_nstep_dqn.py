"""The data flow of a DQN with prioritized n-step transitions.

An actor appends steps; a pattern makes an n-step transition of every window of n + 1 steps. The
learner samples by priority, corrects for it with importance weights, and gives back the new TD
errors. The rate limiter keeps the two in step. A table of values stands in for the network, and a
corridor with a reward at its end for the game.

    python scripts/prioritized_nstep_dqn.py --batches 800
"""

from __future__ import annotations

import argparse
import multiprocessing
from typing import Any

import numpy as np
import numpy.typing as npt

import shmreplay as reverb
from shmreplay import structured

TABLE = "transitions"
N_STEP = 3
GAMMA = 0.9
BATCH = 32
LEARNING_RATE = 0.05
CORRIDOR = 10  # places; the actor starts at 0, and the last one is the end
FORWARD = 0.7  # how often the actor walks towards it
STEPS_MAX = 200

SERVER_GONE = (reverb.errors.ServerClosedError, reverb.errors.StoreNotFoundError)

STEP = {"obs": None, "action": None, "reward": None, "discount": None}


def transition(step: structured.ReferenceStep) -> structured.Pattern:
    """The pattern of a transition; of the newest step it takes only the observation."""
    return {
        "obs": step["obs"][-1 - N_STEP],
        "action": step["action"][-1 - N_STEP],
        "rewards": step["reward"][-1 - N_STEP : -1],
        "discounts": step["discount"][-1 - N_STEP : -1],
        "next_obs": step["obs"][-1],
    }


def make_configs() -> list[structured.Config]:
    """New transitions get priority 1.0, which is about the highest that there is here."""
    pattern = structured.pattern_from_transform(STEP, transition)
    return [structured.create_config(pattern, TABLE)]


def make_server() -> reverb.Server:
    """Serves a prioritized table in which each transition is sampled eight times on average."""
    step_spec = {
        "obs": reverb.TensorSpec((), np.int32),
        "action": reverb.TensorSpec((), np.int32),
        "reward": reverb.TensorSpec((), np.float32),
        "discount": reverb.TensorSpec((), np.float32),
    }
    table = reverb.Table(
        TABLE,
        sampler=reverb.selectors.Prioritized(priority_exponent=0.6),
        remover=reverb.selectors.Fifo(),
        max_size=5000,
        rate_limiter=reverb.rate_limiters.SampleToInsertRatio(
            samples_per_insert=8.0, min_size_to_sample=200, error_buffer=800.0
        ),
        signature=structured.infer_signature(make_configs(), step_spec),
    )
    return reverb.Server([table], capacity=64 << 20)


def run_actor(address: str) -> None:
    """Walks the corridor, with many wrong steps, until the server is gone."""
    random = np.random.default_rng(1)
    with reverb.Client(address) as client:
        try:
            writer = client.structured_writer(make_configs())
            while True:
                play_episode(writer, random)
        except SERVER_GONE:
            return


def play_episode(writer: reverb.StructuredWriter, random: np.random.Generator) -> None:
    """Writes one episode, then steps in which nothing happens any more.

    With these, the last steps have windows of full length too.
    """
    place, ended = 0, False
    for _ in range(STEPS_MAX):
        action = int(random.random() < FORWARD)
        after = max(0, place + 2 * action - 1)
        ended = after == CORRIDOR - 1
        write_step(writer, place, action, float(ended), 0.0 if ended else GAMMA)
        place = after
        if ended:
            break
    for _ in range(N_STEP):
        write_step(writer, place, 0, 0.0, 0.0)
    writer.end_episode()


def write_step(
    writer: reverb.StructuredWriter, obs: int, action: int, reward: float, discount: float
) -> None:
    """Appends a step; a transition is made wherever the pattern applies."""
    writer.append(
        {
            "obs": np.int32(obs),
            "action": np.int32(action),
            "reward": np.float32(reward),
            "discount": np.float32(discount),
        }
    )


def td_errors(values: npt.NDArray[np.float64], data: Any) -> npt.NDArray[np.float64]:
    """N-step returns minus values."""
    discounts = np.cumprod(data["discounts"], axis=1)
    before = np.concatenate([np.ones((len(discounts), 1)), discounts[:, :-1]], axis=1)
    returns = (data["rewards"] * before).sum(axis=1)
    target = returns + discounts[:, -1] * values[data["next_obs"]].max(axis=1)
    return np.asarray(target - values[data["obs"], data["action"]])


def learn(client: reverb.Client, batches: int) -> npt.NDArray[np.float64]:
    """Learns the values of both actions in each place."""
    values = np.zeros((CORRIDOR, 2))
    for _ in range(batches):
        info, data = client.sample_batch(TABLE, BATCH)
        errors = td_errors(values, data)
        weights = (info.table_size * info.probability) ** -0.4
        weights /= weights.max()
        np.add.at(values, (data["obs"], data["action"]), LEARNING_RATE * weights * errors)
        client.update_priorities(TABLE, info.key, np.abs(errors) + 1e-3)
    return values


def main() -> None:
    """Runs an actor and the learner, and shows what was learned."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=800)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with make_server() as server:
        actor = context.Process(target=run_actor, args=(server.address,))
        actor.start()
        with reverb.Client(server.address) as client:
            values = learn(client, arguments.batches)
            info = client.server_info()[TABLE].rate_limiter_info
    actor.join()
    print(f"{info.insert_stats.completed} transitions, {info.sample_stats.completed} samples")
    print("value of walking to the end:", np.round(values[:-1, 1], 2).tolist())
    steps_back = np.arange(CORRIDOR - 1)[values[:-1, 1] <= values[:-1, 0]]
    print(f"places where the greedy action leads back: {steps_back.tolist()}")


if __name__ == "__main__":
    main()
