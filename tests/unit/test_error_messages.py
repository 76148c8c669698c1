"""What errors say: the value that was given, what was expected, and what to do.

`CALLS` makes the errors and looks at each message for three texts. Of all places in the library,
in Python as well as in the binding, that make an error, those that no call of the table comes to
are looked at in the source: their text must have something of what was given, a word of what was
expected, and one of what to do. What remains is listed in `OTHERWISE`, each with its reason.
"""

from __future__ import annotations

import ast
import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits, rate_limiters, reverb_server, selectors, sizes, tree
from shmreplay.bridge import auth
from shmreplay.patterns import PatternNode
from shmreplay.spec import as_spec

PACKAGE: Final = Path(reverb.__file__).parent


class World:
    """A server with tables of two kinds, a client, and a writer with three steps."""

    def __init__(self, stack: ExitStack, make_server: Callable[..., reverb.Server]) -> None:
        self.server = make_server(
            [
                table("t"),
                reverb.Table(
                    "p", selectors.Prioritized(1.0), selectors.Fifo(), 9, rate_limiters.MinSize(1)
                ),
                table("signed", signature={"x": reverb.TensorSpec((None, 2), np.float32)}),
                reverb.Table.queue("queue", 2),
            ]
        )
        self.client = self.server.localhost_client()
        stack.callback(self.client.close)
        self.client.insert_batch("t", {"x": np.zeros((4, 2))})
        self.writer = self.client.trajectory_writer(3)
        stack.callback(self.writer.close)
        for _ in range(3):
            self.writer.append({"x": np.zeros(2, np.float32)})
        self.shards = reverb.ShardedClient([self.client.server_address])
        stack.callback(self.shards.close)
        self.closed = self.server.localhost_client()
        self.closed.insert({"x": 1.0}, {"p": 1.0})
        self.closed.close()

    def legacy(self, *steps: Any) -> Any:
        """A writer of Reverb's first interface, after some steps."""
        writer = self.client.writer(3)
        for step in steps:
            writer.append(step)
        return writer


def table(name: Any, **options: Any) -> reverb.Table:
    arguments: dict[str, Any] = {"sampler": selectors.Uniform(), "remover": selectors.Fifo()}
    arguments |= {"max_size": 50, "rate_limiter": rate_limiters.MinSize(1), **options}
    return reverb.Table(name, **arguments)


class Call(NamedTuple):
    """A call that is refused, and what its message must hold."""

    make: Callable[[Any], object]
    given: str
    expected: str
    remedy: str


# Given what it does not take, which a type checker need not say.
api: Final[Any] = reverb
NAN: Final = float("nan")
SCALAR: Final = {"x": reverb.TensorSpec((), np.float32)}

CALLS: Final = {
    # clients
    "address type": Call(lambda w: api.Client(8000), "8000", "must be a str", "Use server.address"),
    "address": Call(
        lambda w: api.Client("a:b"), "'a:b'", "expected an address like", "Use f'localhost"
    ),
    "no such table": Call(
        lambda w: w.client.sample_batch("no", 1),
        "no",
        "has these tables: 'p', 'queue'",
        "Use one of them",
    ),
    "table type": Call(
        lambda w: w.client.reset(7), "7", "must be named by a str", "Use one of them"
    ),
    "closed client": Call(
        lambda w: w.closed.reset("t"), "localhost:", "expected an open one", "make a new Client"
    ),
    "batch_size": Call(
        lambda w: w.client.sample_batch("t", 0), "got 0", "must be in [1,", "several batches"
    ),
    "batch_size type": Call(
        lambda w: w.client.sample_batch("t", 1.5), "1.5", "expected an int", "Use int("
    ),
    "timeout": Call(
        lambda w: w.client.sample_batch("t", 1, timeout="x"),
        "'x'",
        "expected seconds",
        "None to wait for ever",
    ),
    "timeout nan": Call(
        lambda w: w.client.sample_batch("t", 1, timeout=NAN),
        "nan",
        "expected seconds",
        "None to wait for ever",
    ),
    "num_samples": Call(
        lambda w: list(w.client.sample("t", 0)), "got 0", "must be at least 1", "Give the number"
    ),
    "keys dtype": Call(
        lambda w: w.client.update_priorities("t", np.array([0.5]), [1.0]),
        "float64",
        "must be integers",
        "Take them from info.key",
    ),
    "keys shape": Call(
        lambda w: w.client.update_priorities("t", np.zeros((2, 2), np.uint64), 1.0),
        "[2, 2]",
        "must have shape [N]",
        "ravel()",
    ),
    "key below 0": Call(
        lambda w: w.client.update_priorities("t", np.array([-1]), [1.0]),
        "-1",
        "must not be negative",
        "take them from info.key",
    ),
    "priorities": Call(
        lambda w: w.client.update_priorities("t", [1], ["x"]),
        "'x'",
        "must be numbers",
        "Give a float",
    ),
    "priorities shape": Call(
        lambda w: w.client.update_priorities("t", [1], [1.0, 2.0]),
        "[2]",
        "shape [1]",
        "Give one for each",
    ),
    "priority nan": Call(
        lambda w: w.client.update_priorities("t", [1], [NAN]),
        "nan",
        "must not be NaN",
        "Give a number",
    ),
    "priority below 0": Call(
        lambda w: w.client.insert({"x": 1}, {"p": -1.0}),
        "-1.0",
        "must not be negative",
        "Give a number",
    ),
    "priority too large": Call(
        lambda w: w.client.insert({"x": 1}, {"p": float("inf")}),
        "inf",
        "must be finite",
        "Give a number",
    ),
    "priorities of an insert": Call(
        lambda w: w.client.insert({"x": 1}, {}), "{}", "non-empty dict", "Give for instance"
    ),
    "priority of an insert": Call(
        lambda w: w.client.insert({"x": 1}, {"t": [1.0, 2.0]}),
        "[1.0, 2.0]",
        "must be one number",
        "Use insert_batch",
    ),
    "data none": Call(
        lambda w: w.client.insert({"x": None}, {"t": 1.0}),
        "None",
        "expected an array",
        "Leave the column out",
    ),
    "data empty": Call(
        lambda w: w.client.insert({}, {"t": 1.0}),
        "{}",
        "expected at least one array",
        "Give a column",
    ),
    "data text": Call(
        lambda w: w.client.insert({"x": np.array("abc", object)}, {"t": 1.0}),
        "object",
        "expected bool",
        'np.array(x, "U16")',
    ),
    "batch empty": Call(
        lambda w: w.client.insert_batch("t", {}),
        "{}",
        "expected at least one array",
        "Give a column",
    ),
    "batch of a scalar": Call(
        lambda w: w.client.insert_batch("t", {"x": 1.0}),
        "x",
        "expected an array [N, ...]",
        "Use insert()",
    ),
    "batch of none": Call(
        lambda w: w.client.insert_batch("t", {"x": None}),
        "None",
        "expected an array",
        "Leave the column out",
    ),
    "batch of unequal columns": Call(
        lambda w: w.client.insert_batch("t", {"x": np.zeros(2), "y": np.zeros(3)}),
        "3 rows",
        "same leading axis N",
        "Give a row",
    ),
    "deletes": Call(
        lambda w: w.client.mutate_priorities("t", deletes={7}), "{7}", "must be a list", "Use [key]"
    ),
    "updates": Call(
        lambda w: w.client.mutate_priorities("t", updates=[7]),
        "[7]",
        "must be a dict",
        "{key: priority}",
    ),
    "out": Call(
        lambda w: w.client.sample_batch("t", 1, out={"x": np.zeros((1, 3))}),
        "float64[1, 3]",
        "expected a writable",
        "np.empty",
    ),
    "out columns": Call(
        lambda w: w.client.sample_batch("t", 1, out={}),
        "out has 0",
        "expected an array for each",
        "Give out the structure",
    ),
    "max_size": Call(
        lambda w: w.client.configure_table("t", max_size=10**8),
        "100000000",
        "expected at most",
        "Declare a larger",
    ),
    "prefetch": Call(
        lambda w: w.client.sampler("t", 1, prefetch=-1), "got -1", "must be in [0,", "Give 2"
    ),
    "pickled sampler": Call(
        lambda w: _pickle_sampler(w), "Got a Sampler", "expected what can be sent", "Use its Client"
    ),
    "held back": Call(
        lambda w: w.client.sample_batch("queue", 1, timeout=0.0),
        "within 0.0 s",
        "min_size_to_sample=1",
        "held back by its rate limiter",
    ),
    # servers and tables
    "port": Call(
        lambda w: api.Server([table("x")], port=70000),
        "70000",
        "must be in [1, 65535]",
        "Leave it out",
    ),
    "port taken": Call(
        lambda w: api.Server([table("x")], port=w.server.port),
        "port ",
        "cannot be used",
        "choose another",
    ),
    "recover": Call(
        lambda w: api.Server(None, recover=True),
        "recover=True",
        "expected name=",
        "give that of",
    ),
    "checkpointer": Call(
        lambda w: api.Server([table("x")], checkpointer=7),
        "7",
        "expected one of",
        "Leave it out",
    ),
    "not stopped": Call(
        lambda w: w.server.wait(0.0), "within 0.0 s", "expected another thread", "longer timeout"
    ),
    "tables": Call(lambda w: api.Server(7), "Got 7", "expected a list", "Make one with"),
    "no tables": Call(
        lambda w: api.Server([]), "Got 0 tables", "expected 1 to", "Give at least one"
    ),
    "not a table": Call(
        lambda w: api.Server([7]), "Got 7", "expected shmreplay.Table", "Make it with"
    ),
    "equal names": Call(
        lambda w: api.Server([table("x"), table("x")]),
        "['x']",
        "expected each name once",
        "Rename",
    ),
    "table name": Call(lambda w: table(""), "''", "expected 1 to", "Choose a longer"),
    "table name type": Call(
        lambda w: table(7), "Got the table name 7", "expected a str", "Give its name"
    ),
    "table name text": Call(
        lambda w: table("a\0"), "'a\\x00'", "expected text without", "Choose another"
    ),
    "table size": Call(
        lambda w: table("x", max_size=0), "max_size 0", "expected 1 to", "Give the number"
    ),
    "table size above": Call(
        lambda w: table("x", max_size=2**31),
        "2147483648",
        "expected an int of at most",
        "Give a smaller",
    ),
    "times sampled": Call(
        lambda w: table("x", max_times_sampled=2**40),
        "1099511627776",
        "expected an int of at most",
        "Give 0",
    ),
    "sampler": Call(
        lambda w: table("x", sampler=7), "Got the sampler 7", "expected a selector", "Make one of"
    ),
    "limiter": Call(
        lambda w: table("x", rate_limiter=7),
        "Got the rate_limiter 7",
        "expected a rate limiter",
        "Make one of",
    ),
    "epoch remover": Call(
        lambda w: table("x", remover=selectors.Epoch()),
        "epoch remover",
        "expected another",
        "Use Uniform()",
    ),
    "stripes": Call(lambda w: table("x", stripes=99), "Got 99 stripes", "expected 1 to", "Leave"),
    "striped order": Call(
        lambda w: table("x", sampler=selectors.Lifo(), stripes=2),
        "Got 2 stripes",
        "expected 1, as",
        "Leave",
    ),
    "seed": Call(lambda w: table("x", seed=-1), "seed -1", "expected 0 to", "None for one"),
    "extensions": Call(
        lambda w: table("x", extensions=7), "extensions 7", "expected a list", "Give an empty list"
    ),
    "extension": Call(
        lambda w: table("x", extensions=[7]), "extension 7", "expected an object", "Derive a class"
    ),
    "signature": Call(
        lambda w: table("x", signature={"x": "f4"}),
        "'f4'",
        "expected something with a fixed shape",
        "such as shmreplay.spec",
    ),
    "dtype": Call(
        lambda w: api.TensorSpec((), "f99"), "'f99'", "expected bool", "for instance np.float32"
    ),
    "dtype of objects": Call(
        lambda w: api.TensorSpec((), object), "object", "expected bool", "Convert it"
    ),
    "shape": Call(
        lambda w: api.TensorSpec((-1,), np.int32), "(-1,)", "expected a sequence", "Write () for"
    ),
    "dimensions": Call(
        lambda w: api.TensorSpec((1,) * 99, np.int32),
        "99 dimensions",
        "expected at most",
        "Merge",
    ),
    "spec": Call(lambda w: as_spec(7.5), "7.5", "expected", "such as"),
    "exponent": Call(
        lambda w: selectors.Prioritized(NAN), "nan", "expected a finite", "for instance 0.6"
    ),
    "selector kind": Call(
        lambda w: selectors.from_kind("no"), "'no'", "expected one of", "Use the classes"
    ),
    "ratio": Call(
        lambda w: rate_limiters.SampleToInsertRatio(0, 1, 9),
        "0",
        "expected a finite number above 0",
        "Use MinSize",
    ),
    "buffer": Call(
        lambda w: rate_limiters.SampleToInsertRatio(1, 1, 0.1),
        "0.1",
        "expected at least",
        "Give a larger",
    ),
    "buffer pair": Call(
        lambda w: rate_limiters.SampleToInsertRatio(1, 1, [1, 2, 3]),
        "3 numbers",
        "expected one number",
        "Give one",
    ),
    "min_size": Call(
        lambda w: rate_limiters.MinSize(0), "0", "expected a positive", "Give the items"
    ),
    "queue size": Call(lambda w: rate_limiters.Queue(-1), "-1", "at least 1", "Give the length"),
    # writers
    "keep alive": Call(
        lambda w: w.client.trajectory_writer(0), "got 0", "must be in [1,", "Give the number"
    ),
    "history": Call(
        lambda w: w.client.trajectory_writer(3).history,
        "got 0 steps",
        "before `append`",
        "Call append first",
    ),
    "flush": Call(lambda w: w.writer.flush(-1), "got -1", "must be >= 0", "Use 0"),
    "configure path": Call(
        lambda w: w.writer.configure("x", num_keep_alive_refs=3, max_chunk_length=None),
        "'x'",
        "must be a tuple",
        "Use (name,)",
    ),
    "configure rows": Call(
        lambda w: w.writer.configure(("x",), num_keep_alive_refs=3, max_chunk_length=9),
        "got 9",
        "must be in [1,",
        "Give a smaller",
    ),
    "next_step": Call(
        lambda w: w.client.trajectory_writer(3).next_step().__enter__(),
        "0 appends",
        "expected dtypes",
        "pass spec=",
    ),
    "closed writer": Call(
        lambda w: _closed(w.client.trajectory_writer(3)).append({"x": 1}),
        "a closed writer",
        "expected an open one",
        "make a new one",
    ),
    "legacy length": Call(
        lambda w: w.client.writer(0), "(0)", "must be a positive", "Give the steps"
    ),
    "legacy chunk": Call(
        lambda w: w.client.writer(3, chunk_length=9), "(9)", "must be a positive", "Leave it out"
    ),
    "legacy in flight": Call(
        lambda w: w.client.writer(3, max_in_flight_items=0), "(0)", "must be a positive", "Use None"
    ),
    "legacy item": Call(
        lambda w: w.legacy({"x": 1}).create_item("t", 0, 1.0),
        "(0)",
        "must be a positive",
        "Give the steps",
    ),
    "legacy long item": Call(
        lambda w: w.legacy({"x": 1}).create_item("t", 2, 1.0),
        "got 2",
        "number of buffered",
        "Give fewer",
    ),
    "legacy sequence": Call(
        lambda w: w.legacy().append_sequence({"x": np.zeros(2), "y": np.zeros(3)}),
        "[2, 3]",
        "Expected one length",
        "Give each column",
    ),
    "legacy scalar": Call(
        lambda w: w.legacy().append_sequence({"x": 1.0}),
        "index 0",
        "expected a leading axis",
        "Use append",
    ),
    "legacy empty": Call(
        lambda w: w.legacy().append_sequence({}), "Got {}", "expected at least one", "Give a column"
    ),
    # others
    "key": Call(
        lambda w: limits.checked_key("x"), "'x'", "must be an integer", "Take it from info.key"
    ),
    "path": Call(
        lambda w: api.checkpointers.DefaultCheckpointer(7), "7", "expected a str or a Path", ""
    ),
    "padding": Call(
        lambda w: api.padding.pad_batch([api.ReplaySample(None, {"x": np.zeros(5)})], length=2),
        "5 entries",
        "expected at most",
        "Give a larger",
    ),
    # native writers
    "append after close": Call(
        lambda w: _closed(w.client.trajectory_writer(3)).flush(), "closed", "expected", "make a new"
    ),
    "append dtype": Call(
        lambda w: w.writer.append({"x": np.zeros(2, np.int64)}),
        "Got int64",
        "expected float",
        "Convert it",
    ),
    "append shape": Call(
        lambda w: w.writer.append({"x": np.zeros(3, np.float32)}),
        "Got [3]",
        "Expected is the shape",
        "reshape it",
    ),
    "history index": Call(
        lambda w: w.writer.history["x"][7], "index 7", "expected one of", "Append more"
    ),
    "history slice": Call(
        lambda w: w.writer.history["x"][-9:], "-9", "which has 3 steps", "Use bounds"
    ),
    "history key": Call(
        lambda w: w.writer.history["x"]["a"], "str", "must be indexed by", "Use for instance"
    ),
    "trajectory leaf": Call(
        lambda w: w.writer.create_item("t", 1.0, {"x": 3}), "int", "must be a", "Use for instance"
    ),
    "trajectory of nothing": Call(
        lambda w: w.writer.create_item("t", 1.0, {}), "no columns", "must not be", "give slices"
    ),
    "item priority": Call(
        lambda w: w.writer.create_item("t", "x", {"x": w.writer.history["x"][-1]}),
        "'x'",
        "must be a number",
        "Give a",
    ),
    "item signature": Call(
        lambda w: w.writer.create_item("signed", 1.0, {"x": w.writer.history["x"][-1]}),
        "provided trajectory signature is",
        "Expected is",
        "give each column",
    ),
    "column of nothing": Call(
        lambda w: api.TrajectoryColumn([]), "0 data references", "must not be empty", "Give at"
    ),
    "step open": Call(
        lambda w: _append_in_place(w),
        "in place",
        "expected that to be over",
        "Leave its `with next_step()`",
    ),
    "batch signature": Call(
        lambda w: w.client.insert_batch("signed", {"y": np.zeros((1, 2), np.float32)}),
        "provided trajectory signature is",
        "Expected is",
        "give each column",
    ),
    # patterns
    "config": Call(
        lambda w: w.client.structured_writer([7]), "got 7", "expected a Config", "Use create_config"
    ),
    "configs": Call(
        lambda w: w.client.structured_writer(7), "got 7", "must be a list", "Make them with"
    ),
    "no config": Call(
        lambda w: api.structured_writer.infer_signature([], {}), "none", "must be", "make them"
    ),
    "configs of two tables": Call(
        lambda w: api.structured_writer.infer_signature([_config("t"), _config("p")], SCALAR),
        "p, t",
        "must target the same table",
        "Make a writer for each",
    ),
    "pattern leaf": Call(
        lambda w: api.structured_writer.create_config({"x": 7}, "t"),
        "got 7",
        "must be a column",
        "such as step['obs']",
    ),
    "pattern field": Call(
        lambda w: api.structured_writer.infer_signature([_config("t", field=4)], SCALAR),
        "field 4",
        "There must be one",
        "give the step_spec",
    ),
    "pattern": Call(
        lambda w: w.client.structured_writer([_config("t", start=2)]),
        "got 2",
        "`start` must be < 0",
        "Make it by",
    ),
    "condition": Call(
        lambda w: api.structured_writer.Condition.step_index() > 1.5,
        "1.5",
        "must compare with an int",
        "Use int()",
    ),
    "reference key": Call(
        lambda w: api.structured_writer.create_reference_step({"x": 1})["x"]["a"],
        "'a'",
        "must be int or slice",
        "Use for instance",
    ),
    # datasets
    "dataset table": Call(
        lambda w: reverb.TrajectoryDataset.from_table_signature(w.client.server_address, "no", 1),
        "no",
        "Expected one that it has",
        "Use one of them",
    ),
    "dataset signature": Call(
        lambda w: reverb.TrajectoryDataset.from_table_signature(w.client.server_address, "t", 1),
        "Table t",
        "needs one",
        "make the dataset with dtypes",
    ),
    "dataset number": Call(
        lambda w: _dataset(w, np.float32, (2,), max_samples=0),
        "(0)",
        "must be a positive",
        "Leave it out",
    ),
    "dataset timeout": Call(
        lambda w: _dataset(w, np.float32, (2,), rate_limiter_timeout_ms=-7),
        "(-7)",
        "must be an integer >= -1",
        "Use -1",
    ),
    "dataset structure": Call(
        lambda w: _dataset(w, {"x": np.float32}, {"y": (2,)}), "'y'", "expected one", "Give a shape"
    ),
    "dataset columns": Call(
        lambda w: next(iter(_dataset(w, {"x": np.int8}, {"x": (2,)}))),
        "the item has",
        "The dataset expects",
        "Make the dataset with that",
    ),
    # sharded clients
    "shards": Call(
        lambda w: api.ShardedClient([]), "no addresses", "expected at least one", "Give server"
    ),
    "shards type": Call(
        lambda w: api.ShardedClient("a:1"), "'a:1'", "expected a list", "Use [address]"
    ),
    "shard twice": Call(
        lambda w: api.ShardedClient(["shm://a", "shm://a"]),
        "shm://a",
        "expected each once",
        "Leave",
    ),
    "shard options": Call(
        lambda w: api.ShardedClient(["shm://a"], remote=[]), "0 Remote", "expected as", "Give one"
    ),
    "shard table": Call(
        lambda w: w.shards.sample_batch("no", 1), "'no'", "must be on every", "use one of"
    ),
    "shard keys": Call(
        lambda w: w.shards.update_priorities("t", [7], [1.0]), "7", "expected (shard, key)", "Take"
    ),
    "shard key": Call(
        lambda w: w.shards.update_priorities("t", [(9, 7)], [1.0]), "shard 9", "there are 1", "Take"
    ),
    "shard key dtype": Call(
        lambda w: w.shards.update_priorities("t", np.array([7]), [1.0]),
        "int64",
        "expected (shard, key)",
        "Take them from",
    ),
    "shard updates": Call(
        lambda w: w.shards.mutate_priorities("t", updates=[7]), "[7]", "must be a dict", "Use {"
    ),
    "shard out": Call(
        lambda w: w.shards.sample_batch("t", 1, out={"x": np.zeros(9)}),
        "float64[9]",
        "expected a writable",
        "np.empty",
    ),
    "shard samples": Call(
        lambda w: list(w.shards.sample("t", 0)), "got 0", "must be at least 1", "Give the number"
    ),
    "closed shards": Call(
        lambda w: _closed(reverb.ShardedClient([w.client.server_address])).reset("t"),
        "closed client",
        "expected an open",
        "make a new",
    ),
    "shard in time": Call(
        lambda w: w.shards.sample_batch("queue", 1, timeout=0.0),
        "'queue'",
        "has no items",
        "Insert more",
    ),
    # Reverb's configurations
    "config text": Call(
        lambda w: reverb_server.parse_config("port: {"), "the end of", "expected", "Write it as"
    ),
    "config tables": Call(
        lambda w: reverb_server.parse_config("port: 8000"), "without", "expected one", "Add tables"
    ),
    "config field": Call(
        lambda w: reverb_server.parse_config("porto: 1 tables {}"), "'porto'", "expected of", "Use"
    ),
    "config kind": Call(
        lambda w: reverb_server.parse_config("tables { sampler {} }"),
        "Got no tables[0].remover",
        "expected a message",
        "Add remover { ... }",
    ),
    "proto": Call(
        lambda w: reverb.reverb_types.TableInfo.from_serialized_proto(b"\xff"),
        "Got bytes",
        "expected a protocol buffer",
        "Use what",
    ),
    # others
    "unknown size": Call(
        lambda w: sizes.table_size(table("x")), "neither a sig", "expected shape", "Give signature="
    ),
    "size number": Call(
        lambda w: sizes.table_size(table("x"), SCALAR, steps_per_item=0),
        "0",
        "expected at least",
        "Give a larger",
    ),
    "size overlap": Call(
        lambda w: sizes.table_size(table("x"), SCALAR, steps_per_item=2, overlap=2),
        "overlap by 2",
        "expected an overlap below",
        "Give such",
    ),
    "leaves": Call(
        lambda w: tree.unflatten_as({"x": 1}, []), "Got 0", "Expected is one", "give them in"
    ),
    "shut or gone": Call(
        lambda w: api.Client("shm://no-such-store").server_info(timeout=0),
        "no-such-store",
        "expected",
        "Start",
    ),
    "store to recover": Call(
        lambda w: api.Server(None, name=w.server.name, recover=True),
        "in use by living processes",
        "expected",
        "Stop",
    ),
    "keygen": Call(
        lambda w: auth.keygen("/nonexistent", "a/b"), "'a/b'", "expected a plain", "Give the"
    ),
    "key file": Call(
        lambda w: api.Client(
            "tcp://localhost:9", reverb.RemoteOptions(keys=auth.ClientKeys("/nonexistent", "x"))
        ).stats(),
        "/nonexistent",
        "Expected one",
        "give the path",
    ),
}


def _closed(handle: Any) -> Any:
    handle.close()
    return handle


def _append_in_place(world: World) -> None:
    with world.writer.next_step():
        world.writer.append({"x": np.zeros(2, np.float32)})


def _config(name: str, field: int = 0, start: int | None = None) -> Any:
    """A configuration of one column: the newest step, or those from `start` on."""
    step = reverb.structured_writer.create_reference_step([None] * (field + 1))
    leaf = step[field][-1:] if start is None else PatternNode(flat_source_index=field, start=start)
    return reverb.structured_writer.create_config({"x": leaf}, name)


def _dataset(world: World, dtypes: Any, shapes: Any, **options: Any) -> Any:
    arguments = {"max_in_flight_samples_per_worker": 1, **options}
    return reverb.TrajectoryDataset(world.client.server_address, "t", dtypes, shapes, **arguments)


def _pickle_sampler(world: World) -> object:
    with world.client.sampler("t", 1) as sampler:
        return pickle.dumps(sampler)


@pytest.fixture
def world(make_server: Callable[..., reverb.Server]) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, make_server)


def raised(world: World, call: Call) -> BaseException:
    with pytest.raises((errors.ReverbError, ValueError, TypeError)) as caught:
        call.make(world)
    return caught.value


@pytest.mark.parametrize("name", CALLS)
def test_a_message_says_what_was_given_what_was_expected_and_what_to_do(
    name: str, world: World
) -> None:
    call = CALLS[name]
    message = str(raised(world, call))
    for text in (call.given, call.expected, call.remedy):
        assert text in message, message
    # As the others are looked at in the source, these are as they come.
    assert EXPECTED.search(message), message
    assert REMEDY.search(message), message


def test_an_error_of_the_protocol_says_what_to_do_whatever_it_was() -> None:
    text = str(errors.ProtocolError("a second HELLO"))
    assert text.startswith("a second HELLO; expected ")
    assert EXPECTED.search(text)
    assert REMEDY.search(text)
    assert str(errors.ProtocolError(text)) == text  # as told by one side, and then by the other


# --- completeness -------------------------------------------------------------------------------

EXPECTED: Final = re.compile(
    r"\bexpected\b|\bexpects?\b|\bmust\b|\bat most\b|\bat least\b|\btakes\b|\bneeds\b"
    r"|there (are|is)|has these|already|\bwanted\b|\bcannot contain\b"
    r"|held back by its rate limiter",
    re.IGNORECASE,
)
VERBS: Final = (
    "add append ask call check choose close convert copy create declare decode delete derive encode"
    " finish flatten free give insert install keep leave look make merge mount name open pass put"
    " raise reduce remove rename reshape restart restore run sample say see set split spread stack"
    " start stop take try use wait write"
)
REMEDY: Final = re.compile(
    rf"(?:^|[.;:,(] |\bor |\band |\bto )(?:{'|'.join(VERBS.split())})\b|`shmreplay|pip install"
    "|for instance|such as|or None",
    re.IGNORECASE,
)

# Where a message is put together elsewhere, or a remedy would have nothing to say: beginnings of
# texts by module, with the reason.
OTHERWISE: Final = {
    ("*", "{e}"): "passes on the message of another error",
    ("*", "{str(error)}"): "passes on the message of another error",
    ("*", "{_DIED}"): "a constant with all three",
    ("*", "{self._closed()}"): "a method that gives all three",
    ("*", "{step_open_already("): "a function that gives all three",
    ("pattern_stream", "Tensor of wrong dtype"): "conversion_hint() says what to do",
    ("drawing", "no sample within"): "describe() says what it waits for and what would end it",
    ("_binding/session.pxi", "no sample within"): "as of drawing",
    ("_binding/insert_batch.pxi", "{before + total} items inserted"): "as of drawing",
    ("bridge/operations", "no sample within"): "as of drawing",
    ("bridge/operations", "{done} items inserted"): "as of drawing",
    ("bridge/sampler", "no sample within"): "as of drawing",
    ("bridge/channel", "create_item did not complete"): "as of drawing",
    ("bridge/channel", "0 items inserted within"): "as of drawing",
    ("bridge/channels", "{what} did not complete"): "as of drawing",
    ("bridge/operations", "earlier answers were not taken"): "nothing was given",
    ("bridge/protocol", "{text}"): "passes on the message of another error",
    ("recovery", "{found.problem}"): "passes on the message of another error",
    ("reverb_server", "{where}: {error}"): "passes on the message of another error",
    ("segment", "{errno."): "is caught where the segment was opened",
    ("shard", "it was stopped, or"): "the error of a call says it of each shard, with what to do",
    ("tf_client", "TFClient needs TensorFlow"): "nothing was given",
    ("_binding/batch.pxi", "no memory for"): "of the process itself, as Python's own",
    ("_binding/memory.pxi", "no memory for"): "of the process itself, as Python's own",
    ("_binding/columns.pxi", "no memory for"): "of the process itself, as Python's own",
    ("_binding/status.pxi", "{what}: the store is full"): "says how much there is",
    ("_binding/status.pxi", "{what}: the file system"): "says how much was asked for",
    ("_binding/status.pxi", "{what}: what the table holds"): "what a store holds, and what to do",
    ("_binding/status.pxi", "{what}: no free entry"): "says which bounds, and what to do",
    ("client_tables", "ServerInfo call did not"): "passes on the message of what was waited for",
    ("checkpointers", "Got {name}"): "what is expected is what to give",
    ("checkpointers", "Got group"): "what is expected is what to give",
    ("trajectory_writer", "{what} did not complete"): "says what it waits for",
    ("binding_support", "{why} Table"): "{why} says what is expected",
    ("table_config", "Got the settings of a table"): "what a store holds, not what a user gives",
    ("table_config", "Got damaged settings"): "what a store holds, not what a user gives",
    ("table_checks", "Got {stripes} stripes"): "the remedy is {hint}",
    ("spec", "Got data of dtype"): "the remedy is {hint}",
    ("spec", "Got the dtype {wanted}"): "the remedy is _hint()",
    ("spec", "Got a signature with the leaf"): "what a store holds, not what a user gives",
    ("spec", "Got a signature of {len(text)} bytes"): "what a store holds",
    ("spec", "Got a signature that is not JSON"): "what a store holds, not what a user gives",
    ("spec", "Got a damaged signature"): "what a store holds, not what a user gives",
    ("spec", "Got the name"): "what is expected is what to give",
    ("spec", "None is not a dtype"): "is caught where it is raised, and told as a bad dtype",
    ("serve_config", "{self.file}: {self.where}: got {key}"): "{expected} is what to write there",
    ("serve_config", "{section.file}: {section.where}: {error}"): "passes on another message",
    ("serve_config", "{path}: got what is not TOML"): "the parser says what and where",
    ("serve_config", "Got the file"): "what is expected is what to give",
    ("serve_config", "{path}: {where}: got name"): "what is expected is what to write there",
    ("metrics", "Got the source"): "what is expected is what to give",
    ("writer", "Number of tensors"): "Reverb's words, which say both numbers",
    ("writer", "Unable to CreateItem"): "Reverb's words, and both signatures",
    ("writer", "Cannot reuse already"): "Reverb's words",
    ("writer", "close() has already"): "Reverb's words",
    ("trajectory_writer", "Unable to replace"): "says what structure there is, and how to get it",
    ("checkpoint", "The checkpoint was given up"): "nothing was given; says what to do",
    ("checkpoint", "Got no turn"): "what is expected is that nobody else saves",
    ("checkpoint", "Got an error while"): "passes on what the system says",
    ("checkpoint_format", "{self._manifest_path}"): "{what} says what is wrong",
    ("checkpoint_format", "{self._index_path}"): "{what} says what is wrong",
    ("checkpoint_format", "{path} at offset {len(text)}: Got a manifest"): "says how it ends",
    ("checkpoint_restore", "Trying to load table"): "Reverb's words, and both lists of tables",
    ("checkpoint_restore", "{what.path}: {error}"): "passes on the message of another error",
    ("checkpoint_restore", "Got the checkpoint"): "says what there is, and passes on what lacks",
    ("integrations/minari", "got dataset id"): "says how to get others",
    ("integrations/minari", "got dataset_id"): "passes on what Minari says",
    ("store_file", "Got the path {path}"): "what is expected is what to give",
    ("store_file", "Got a store of"): "passes on what the system says",
    ("table_checks", "Got the table extensions"): "what is expected is what to give",
}


class Site(NamedTuple):
    module: str
    first: int
    last: int
    text: str


def text_of(node: ast.expr) -> str:
    """A string as it is written, with what is put in as `{expression}`."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"  # type: ignore[attr-defined]
            for part in node.values
        )
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return f"{{{ast.unparse(node)}}}"


def sites() -> list[Site]:
    """Every place in the library that makes an error with a message.

    Errors of the protocol are left out: what each of them says at its end is tested above.
    """
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = str(path.relative_to(PACKAGE).with_suffix(""))
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func).split(".")[-1]
            if name.endswith("Error") and name != "ProtocolError":
                assert node.end_lineno is not None
                found.append(Site(module, node.lineno, node.end_lineno, text_of(node.args[0])))
    for path in sorted(PACKAGE.rglob("*.pxi")):
        found += binding_sites(path)
    return found


def binding_sites(path: Path) -> Iterator[Site]:
    """As `sites`, of a file in Cython, which `ast` does not read: literals up to the last `)`."""
    source = path.read_text()
    for call in re.finditer(r"\b(?<!_)([A-Z]\w*Error)\((?=\s*\w*\"|\s*f\")", source):
        at, depth = call.end(), 1
        while depth:
            if source[at] == '"':
                at = source.index('"', at + 1)
            depth += {"(": 1, ")": -1}.get(source[at], 0)
            at += 1
        text = "".join(re.findall(r'"([^"]*)"', source[call.end() : at]))
        first, last = (source.count("\n", 0, end) + 1 for end in (call.start(), at))
        yield Site(str(path.relative_to(PACKAGE)), first, last, text)


def excused(site: Site) -> bool:
    return any(
        module in ("*", site.module) and (start == "*" or site.text.startswith(start))
        for module, start in OTHERWISE
    )


def explains_itself(site: Site) -> bool:
    given = "{" in site.text or "Got " in site.text or "got " in site.text
    return given and bool(EXPECTED.search(site.text)) and bool(REMEDY.search(site.text))


def test_every_error_is_in_the_table_or_explains_itself(world: World) -> None:
    reached: set[tuple[str, int]] = set()
    for call in CALLS.values():
        error: BaseException | None = raised(world, call)
        while error is not None:
            for frame in traceback.extract_tb(error.__traceback__):
                name = frame.filename.split("shmreplay/")[-1].removesuffix(".py")
                reached.add((name, frame.lineno or 0))
            error = error.__context__
    found = sites()
    assert len(found) > 400
    silent = [
        f"{site.module}:{site.first}: {site.text}"
        for site in found
        if not any((site.module, line) in reached for line in range(site.first, site.last + 1))
        and not explains_itself(site)
        and not excused(site)
    ]
    assert not silent, "\n".join(silent)


def test_no_excuse_is_stale() -> None:
    found = sites()
    for module, start in OTHERWISE:
        assert any(
            module in ("*", site.module) and (start == "*" or site.text.startswith(start))
            for site in found
        ), (module, start)
