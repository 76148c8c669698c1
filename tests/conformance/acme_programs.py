"""Runs DeepMind Acme on shmreplay in a process of its own: `python acme_programs.py WHAT`.

Acme imports `reverb`, which is shmreplay here. What else it imports and does not need for writing
and reading replay is stood in for, since the release on PyPI is older than today's packages.
"""

from __future__ import annotations

import importlib
import sys
import types
import unittest
from typing import Any

import numpy as np


def prepare() -> None:
    import jax

    import shmreplay

    sys.modules["reverb"] = shmreplay
    # Acme's process launcher: used by programs that run over several machines alone.
    sys.modules.setdefault("launchpad", types.ModuleType("launchpad"))
    if not hasattr(jax.numpy, "DeviceArray"):  # the name of old for jax.Array
        jax.numpy.DeviceArray = jax.Array


def run_acmes_own_tests(adder: str) -> None:
    """Acme's tests of an adder: they write through it and compare what they sample."""
    prepare()
    module = importlib.import_module(f"acme.adders.reverb.{adder}_test")
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=1).run(suite)
    print(f"ran {result.testsRun} tests, {len(result.failures) + len(result.errors)} failed")
    sys.exit(0 if result.wasSuccessful() and result.testsRun > 0 else 1)


def learn_from_transitions() -> None:
    """Actor and learner of a DQN: n-step adder, signature, and Acme's TensorFlow dataset."""
    prepare()
    import dm_env
    import reverb
    from acme import specs
    from acme.adders import reverb as adders
    from acme.datasets import reverb as datasets

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
        max_size=100,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature=adders.NStepTransitionAdder.signature(spec),
    )
    server = reverb.Server([table], capacity=32 << 20)
    client = reverb.Client(f"localhost:{server.port}")
    adder = adders.NStepTransitionAdder(client, n_step=3, discount=0.5)
    adder.add_first(dm_env.restart(np.full(2, 0, np.float32)))
    length = 6
    for t in range(1, length + 1):
        make: Any = dm_env.termination if t == length else dm_env.transition
        step = make(reward=np.float32(t), observation=np.full(2, t, np.float32))
        step = step._replace(discount=np.float32(step.discount))
        adder.add(np.int32(t % 4), step)
    made = datasets.make_reverb_dataset(
        server_address=client.server_address, batch_size=256, prefetch_size=1, num_parallel_calls=2
    )
    (batch,) = list(made.take(1).as_numpy_iterator())
    data = batch.data
    seen = {
        (first, last): (action, reward, discount)
        for first, last, action, reward, discount in zip(
            data.observation[:, 0].tolist(),
            data.next_observation[:, 0].tolist(),
            data.action.tolist(),
            data.reward.tolist(),
            data.discount.tolist(),
            strict=True,
        )
    }
    # Over one to three steps at the ends of the episode, three in its middle; rewards are 1, 2, ...
    expected = {
        (first, last): (
            (first + 1) % 4,
            sum((first + 1 + n) * 0.5**n for n in range(last - first)),
            (0.0 if last == length else 1.0) * 0.5 ** (last - first - 1),
        )
        for first in range(length)
        for last in range(first + 1, min(first + 3, length) + 1)
        if first == 0 or last == length or last - first == 3
    }
    assert seen == expected, f"got {seen}, expected {expected}"
    print(f"{len(seen)} transitions as they should be")
    del adder
    server.stop()


if __name__ == "__main__":
    if sys.argv[1] == "transitions":
        learn_from_transitions()
    else:
        run_acmes_own_tests(sys.argv[1])
