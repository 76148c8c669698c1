"""An episode written by DeepMind Acme's n-step adder, and a batch of it read back.

    pip install tensorflow jax dm-env dm-tree absl-py && pip install --no-deps dm-acme
    python scripts/acme_adders.py --steps 20

Acme imports `reverb`; `stand_in_for_reverb` gives it shmreplay under that name. Nothing else
differs from a program with Reverb.
"""

from __future__ import annotations

import argparse
import sys
import types
from typing import Any

import numpy as np

import shmreplay

N_STEP = 3
DISCOUNT = 0.9
BATCH = 16


def stand_in_for_reverb() -> None:
    """Lets Acme's release on PyPI import what it wants."""
    sys.modules["reverb"] = shmreplay
    # Its launcher of processes on many machines, which adders do not use.
    sys.modules.setdefault("launchpad", types.ModuleType("launchpad"))


def play(adder: Any, steps: int) -> None:
    """Writes an episode: the observation is the number of the step, and so is the reward."""
    import dm_env

    adder.add_first(dm_env.restart(np.zeros(2, np.float32)))
    for t in range(1, steps + 1):
        make: Any = dm_env.termination if t == steps else dm_env.transition
        step = make(reward=np.float32(t), observation=np.full(2, t, np.float32))
        # Acme's signature has the discount as float32.
        adder.add(np.int32(t % 4), step._replace(discount=np.float32(step.discount)))


def main() -> None:
    """Writes and reads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="of the episode")
    options = parser.parse_args()
    stand_in_for_reverb()

    import reverb
    from acme import specs
    from acme.adders import reverb as adders

    spec = specs.EnvironmentSpec(
        observations=specs.Array((2,), np.float32),
        actions=specs.DiscreteArray(4),
        rewards=specs.Array((), np.float32),
        discounts=specs.BoundedArray((), np.float32, 0.0, 1.0),
    )
    table = reverb.Table(
        name=adders.DEFAULT_PRIORITY_TABLE,
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=10_000,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature=adders.NStepTransitionAdder.signature(spec),
    )
    with reverb.Server([table], capacity=64 << 20) as server:
        client = reverb.Client(f"localhost:{server.port}")
        adder = adders.NStepTransitionAdder(client, n_step=N_STEP, discount=DISCOUNT)
        play(adder, options.steps)
        size = client.server_info()[table.name].current_size
        print(f"{size} transitions of an episode of {options.steps} steps")

        # Acme's own datasets read it as well; this needs no TensorFlow.
        data = client.sample_batch(table.name, BATCH).data
        first, last = data.observation[:, 0], data.next_observation[:, 0]
        rewards = [
            sum((f + 1 + n) * DISCOUNT**n for n in range(int(e - f)))
            for f, e in zip(first, last, strict=True)
        ]
        right = np.allclose(data.reward, rewards) and bool((last - first <= N_STEP).all())
        print(f"{len(first)} of them sampled; their rewards are {'right' if right else 'wrong'}")
        del adder


if __name__ == "__main__":
    main()
