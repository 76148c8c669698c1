import numpy as np
import reverb
import tensorflow as tf

server = reverb.Server(
    [
        reverb.Table(
            "replay",
            reverb.selectors.Prioritized(0.6),
            reverb.selectors.Fifo(),
            max_size=10_000,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature={
                "obs": tf.TensorSpec([1, 4], tf.float32),
                "reward": tf.TensorSpec([1], tf.float64),
            },
        )
    ]
)
client = reverb.Client(f"localhost:{server.port}")
with client.trajectory_writer(1) as writer:
    for step in range(1000):
        writer.append({"obs": np.full(4, step, np.float32), "reward": 1.0})
        item = {name: column[-1:] for name, column in writer.history.items()}
        writer.create_item("replay", 1.0, item)
    writer.flush()
dataset = reverb.TrajectoryDataset.from_table_signature(
    client.server_address, "replay", max_in_flight_samples_per_worker=64
).batch(32)
batch = next(iter(dataset))
keys = batch.info.key.numpy()
client.mutate_priorities("replay", dict(zip(keys.tolist(), np.random.rand(32), strict=True)))
assert batch.data["obs"].shape == (32, 1, 4)
