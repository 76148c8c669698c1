"""Stands where Reverb has its TensorFlow operations; importing it says what to use."""

raise ImportError(
    "Got an import of Reverb's own TensorFlow operations; expected the Python classes that use "
    "them. Use TrajectoryDataset, TimestepDataset, PatternDataset or TFClient of shmreplay."
)
