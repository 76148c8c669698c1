"""What the numbers mean that `Server.stats` and `Client.stats` give: one line a key.

A key of a table comes as ``TABLE/KEY``. All are kept in shared memory, so that they outlive the
process that counts, and are the same whoever asks. A table's counters begin anew when the table is
reset; those of the store go on as long as the store does. After a process died in the middle of an
operation a counter may be off by that operation; sizes, inserts, samples and deletes are not.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["COUNTER", "GAUGE", "SERVER", "STORE", "TABLE", "Key"]

COUNTER: Final = "counter"
"""Only grows, until it begins anew."""
GAUGE: Final = "gauge"
"""Goes up and down."""


class Key(NamedTuple):
    """A number that is counted."""

    kind: str
    """``COUNTER`` or ``GAUGE``."""
    about: str
    """What it says."""


STORE: Final = {
    "capacity_bytes": Key(GAUGE, "Bytes that the store may take of /dev/shm."),
    "committed_bytes": Key(
        GAUGE, "Bytes that it has taken: the sum of the next four and margin_bytes."
    ),
    "fixed_bytes": Key(GAUGE, "Of these for what every store needs: header, places, settings."),
    "index_bytes": Key(GAUGE, "Of these for slots of items, selectors and rings of events."),
    "arena_used_bytes": Key(GAUGE, "Of these for steps and trajectories."),
    "arena_free_bytes": Key(GAUGE, "Of these for steps to come."),
    "arena_committed_bytes": Key(GAUGE, "Used and free together."),
    "arena_allocations": Key(GAUGE, "Blocks, trajectories and records that are in use."),
    "compressed_raw_bytes": Key(GAUGE, "Bytes of steps that are kept compressed, uncompressed."),
    "compressed_stored_bytes": Key(GAUGE, "What these take of arena_used_bytes."),
    "block_bytes": Key(GAUGE, "Of what is used: blocks of steps."),
    "trajectory_bytes": Key(GAUGE, "Of what is used: trajectories, which say what items refer to."),
    "pinned_bytes": Key(GAUGE, "Of what is used: what only who reads or writes it just now keeps."),
    "episode_bytes": Key(GAUGE, "Of what is used: records of episodes."),
    "ledger_bytes": Key(GAUGE, "Of what is used: lists of what each writer and sampler holds."),
    "schema_bytes": Key(GAUGE, "Of what is used: structures of items."),
    "margin_bytes": Key(GAUGE, "Of the arenas: what begins and ends them."),
    "free_bytes": Key(GAUGE, "Of what is free: in one piece, at the end of an arena."),
    "fragmented_bytes": Key(GAUGE, "Of what is free: gaps between what is used."),
    "participants": Key(GAUGE, "Processes that are attached, with those that died just now."),
    "sessions": Key(GAUGE, "Places in use of writers, samplers and calls of clients."),
    "borrowed_batches": Key(GAUGE, "Batches that are lent as views."),
    "borrowed_items": Key(GAUGE, "Items in them."),
    "oldest_borrow_s": Key(GAUGE, "Seconds since the oldest of them was lent; 0: none is."),
    "oldest_borrow_pid": Key(GAUGE, "Id of the process that has it; 0: none."),
    "inserts": Key(COUNTER, "Items inserted, into all tables."),
    "samples": Key(COUNTER, "Items sampled, from all tables."),
    "updates": Key(COUNTER, "Priorities set, in all tables."),
    "written_bytes": Key(COUNTER, "Bytes of steps written."),
    "repairs": Key(COUNTER, "Times that the store was mended after a death inside a lock."),
    "poisoned_tables": Key(GAUGE, "Tables that are shut, as a repair failed."),
    "closed": Key(GAUGE, "1 if the server was stopped."),
}
"""Of the store."""

SERVER: Final = {
    "checkpoints_written": Key(COUNTER, "Checkpoints that this server has written."),
    "checkpoint_failures": Key(COUNTER, "Checkpoints that could not be written."),
    "checkpoint_last_s": Key(GAUGE, "Seconds that the last one took."),
    "checkpoint_last_held_s": Key(GAUGE, "Seconds of these in which it held everybody up."),
    "checkpoint_last_bytes": Key(GAUGE, "Bytes that the last one refers to."),
    "checkpoint_last_new_bytes": Key(GAUGE, "Bytes of these that were written anew."),
}
"""Of the server's process: in `Server.stats` alone."""

TABLE: Final = {
    "size": Key(GAUGE, "Items in the table."),
    "max_size": Key(GAUGE, "Items that it may hold."),
    "max_size_limit": Key(GAUGE, "What max_size may be raised to while it is in use."),
    "max_bytes": Key(GAUGE, "Bytes that its items may keep; 0: no bound."),
    "data_bytes": Key(GAUGE, "Bytes that its items keep; counted where max_bytes is set, else 0."),
    "index_bytes": Key(GAUGE, "Bytes of its slots, selectors and ring of events."),
    "max_times_sampled": Key(GAUGE, "Samples after which an item leaves; 0: no bound."),
    "inserts": Key(COUNTER, "Items inserted."),
    "samples": Key(COUNTER, "Items sampled."),
    "updates": Key(COUNTER, "Priorities set by key."),
    "missed_updates": Key(COUNTER, "Priorities for keys that were not there any more."),
    "deletes": Key(COUNTER, "Items that left: the sum of the next three."),
    "evicted": Key(COUNTER, "Of these by the remover."),
    "deleted": Key(COUNTER, "Of these by key."),
    "consumed": Key(COUNTER, "Of these as they had been sampled max_times_sampled times."),
    "pending": Key(GAUGE, "Inserts that the limiter let pass and that are on their way."),
    "num_episodes": Key(GAUGE, "Episodes that its items are of."),
    "num_deleted_episodes": Key(COUNTER, "Episodes whose last item left."),
    "num_unique_samples": Key(COUNTER, "Items that were sampled at least once."),
    "insert_waiters": Key(GAUGE, "Threads that sleep until they may insert."),
    "sample_waiters": Key(GAUGE, "Threads that sleep until they may sample."),
    "inserts_refused": Key(
        COUNTER,
        "Times that the limiter let no insert pass; a call that waits asks ten times a second.",
    ),
    "samples_refused": Key(COUNTER, "The same of samples."),
    "insert_wait_s": Key(
        COUNTER, "Seconds that threads slept until they might insert, all together."
    ),
    "sample_wait_s": Key(COUNTER, "The same of samples."),
    "samples_per_insert": Key(GAUGE, "The limiter's setting of this name."),
    "min_size_to_sample": Key(GAUGE, "The limiter's setting of this name."),
    "min_diff": Key(GAUGE, "The limiter's setting of this name."),
    "max_diff": Key(GAUGE, "The limiter's setting of this name."),
    "mass": Key(
        GAUGE, "The sum of the sampler's weights: of priority**exponent, or the size for others."
    ),
    "max_priority": Key(GAUGE, "The largest priority of any insert or update; 1: none yet."),
    "poisoned": Key(GAUGE, "Not 0: the table is shut, as a repair failed."),
    "events": Key(GAUGE, "Changes that wait for the table's extensions."),
    "events_capacity": Key(GAUGE, "How many may wait; 0: the table has no extensions."),
    "events_dropped": Key(COUNTER, "Changes that its extensions will not be told of."),
    "extension_errors": Key(
        COUNTER, "Calls of its extensions that raised; from `Server.stats` alone."
    ),
}
"""Of each table."""
