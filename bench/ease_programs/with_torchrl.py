import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

replay = TensorDictPrioritizedReplayBuffer(
    alpha=0.6, beta=0.4, storage=LazyTensorStorage(10_000), batch_size=32
)
for step in range(1000):
    replay.add(TensorDict({"obs": torch.full((4,), float(step)), "reward": torch.ones(1)}, []))
batch = replay.sample()
batch["td_error"] = torch.rand(32)
replay.update_tensordict_priority(batch)
assert batch["obs"].shape == (32, 4)
