import numpy as np

import shmreplay as reverb

table = reverb.Table(
    "replay",
    reverb.selectors.Prioritized(0.6),
    reverb.selectors.Fifo(),
    max_size=10_000,
    rate_limiter=reverb.rate_limiters.MinSize(1),
)
with reverb.Server([table]) as server:
    client = server.localhost_client()
    for step in range(1000):
        client.insert({"obs": np.full(4, step, np.float32), "reward": 1.0}, {"replay": 1.0})
    batch = client.sample_batch("replay", 32)
    client.update_priorities("replay", batch.info.key, np.random.rand(32))
    assert batch.data["obs"].shape == (32, 1, 4)
