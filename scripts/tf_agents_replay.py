"""Episodes written into TF-Agents' ReverbReplayBuffer, and a batch of its dataset.

    pip install tensorflow tf-keras gin-config decorator tensorflow-probability cloudpickle
    pip install --no-deps tf-agents gym gym_notices
    TF_USE_LEGACY_KERAS=1 python scripts/tf_agents_replay.py --episodes 4

TF-Agents imports `reverb`, which is shmreplay here. Nothing else differs from a program with
Reverb.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import numpy as np

import shmreplay

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # TF-Agents is older than Keras 3
sys.modules["reverb"] = shmreplay

TABLE = "uniform_table"
EPISODE = 10  # steps
SEQUENCE = 2  # steps of an item
BATCH = 8


def trajectories(trajectory: Any, episode: int) -> list[Any]:
    """The steps of an episode as TF-Agents has them: 0 is the kind of the first, 2 of the last."""
    kinds = [0] + [1] * (EPISODE - 2) + [2]
    return [
        trajectory.Trajectory(
            step_type=np.array(kind, np.int32),
            observation=np.array([episode, t], np.float32),
            action=np.array(t % 3, np.int32),
            policy_info=(),
            next_step_type=np.array(kinds[(t + 1) % EPISODE], np.int32),
            reward=np.array(t, np.float32),
            discount=np.array(0.0 if kind == 2 else 1.0, np.float32),
        )
        for t, kind in enumerate(kinds)
    ]


def main() -> None:
    """Writes and reads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=4, help="to write")
    options = parser.parse_args()

    import tensorflow as tf
    from tf_agents.replay_buffers import reverb_replay_buffer, reverb_utils
    from tf_agents.specs import tensor_spec
    from tf_agents.trajectories import trajectory

    example = trajectories(trajectory, 0)[0]
    spec = tf.nest.map_structure(lambda array: tf.TensorSpec(array.shape, array.dtype), example)
    table = shmreplay.Table(
        TABLE,
        sampler=shmreplay.selectors.Uniform(),
        remover=shmreplay.selectors.Fifo(),
        max_size=10_000,
        rate_limiter=shmreplay.rate_limiters.MinSize(1),
        signature=tensor_spec.add_outer_dim(spec),
    )
    with shmreplay.Server([table], capacity=64 << 20) as server:
        replay = reverb_replay_buffer.ReverbReplayBuffer(
            spec, table_name=TABLE, sequence_length=SEQUENCE, local_server=server
        )
        observer = reverb_utils.ReverbAddTrajectoryObserver(replay.py_client, TABLE, SEQUENCE)
        for episode in range(options.episodes):
            for step in trajectories(trajectory, episode):
                observer(step)
            observer.reset()
        print(f"{int(replay.num_frames())} sequences of {options.episodes} episodes")

        dataset = replay.as_dataset(sample_batch_size=BATCH, num_steps=SEQUENCE)
        batch, info = next(iter(dataset))
        seen = batch.observation.numpy()  # [B, T, (episode, step)]
        apart = seen[:, 1] - seen[:, 0]
        right = bool((apart == [0, 1]).all()) and batch.reward.shape == (BATCH, SEQUENCE)
        print(f"a batch of {len(info.key)}: its steps {'follow' if right else 'do not follow'}")
        observer.close()


if __name__ == "__main__":
    main()
