import numpy as np
from cpprb import PrioritizedReplayBuffer

replay = PrioritizedReplayBuffer(10_000, {"obs": {"shape": 4}, "reward": {}}, alpha=0.6)
for step in range(1000):
    replay.add(obs=np.full(4, step, np.float32), reward=1.0)
batch = replay.sample(32)
replay.update_priorities(batch["indexes"], np.random.rand(32))
assert batch["obs"].shape == (32, 4)
