"""Columns of text: of one width, as numpy has them; over each way to a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, structured
from shmreplay.cli import main
from shmreplay.padding import pad_batch

MakeClient = Callable[..., tuple[reverb.Server, reverb.Client]]
WORDS = ["a", "\u0394x", "three", ""]


def table(name: str = "t", **options: Any) -> reverb.Table:
    usual: dict[str, Any] = {
        "sampler": reverb.selectors.Fifo(),
        "remover": reverb.selectors.Fifo(),
        "max_size": 100,
        "rate_limiter": reverb.rate_limiters.MinSize(1),
    }
    return reverb.Table(name, **{**usual, **options})


def wide(text: Any, dtype: str) -> Any:
    """The text as numpy has it, at this width."""
    return np.array(text, dtype)


def columns(n: int, dtype: str) -> dict[str, Any]:
    return {
        "text": reverb.TensorSpec((n,), dtype),
        "pair": reverb.TensorSpec((n, 2), "S3"),
        "x": reverb.TensorSpec((n,), np.float32),
    }


def step(text: Any, x: float) -> dict[str, Any]:
    return {"text": text, "pair": np.array([b"l", b"r"], "S3"), "x": np.float32(x)}


@pytest.mark.parametrize("dtype", ["U8", "S8"])
def test_steps_of_text_come_back(make_client: MakeClient, dtype: str) -> None:
    server, client = make_client([table(signature=columns(3, dtype))])
    words: list[Any] = [word if dtype[0] == "U" else word.encode() for word in WORDS]
    with client.trajectory_writer(3) as writer:
        for i, word in enumerate(words):
            writer.append(step(word, i))
        writer.create_item("t", 1.0, {k: c[-3:] for k, c in writer.history.items()})
    assert writer.history["text"][-1:].dtype == np.dtype(dtype)
    expected = wide(words[1:], dtype)
    batch = client.sample_batch("t", 2)
    assert batch.data["text"].dtype == expected.dtype and batch.data["pair"].shape == (2, 3, 2)
    assert (batch.data["text"] == expected).all() and (batch.data["pair"] == [b"l", b"r"]).all()
    with client.borrow("t") as (lent,):
        assert (lent.data["text"] == expected).all() and not lent.data["text"].flags.writeable
    steps = next(iter(client.sample("t", emit_timesteps=True)))
    assert [s.data[1] for s in steps] == words[1:]  # pair, text, x
    out = {k: np.empty_like(v) for k, v in batch.data.items()}
    assert client.sample_batch("t", 2, out=out).data["text"] is out["text"]
    assert (out["text"] == expected).all()
    client.check()
    server.check()


def test_the_first_step_sets_the_width_and_longer_text_is_an_error(
    make_client: MakeClient,
) -> None:
    _, client = make_client([table()])
    with client.trajectory_writer(4) as writer:
        writer.append({"u": "abc", "s": np.array([b"ab", b"c"]), "x": 1})
        for value in ("a", np.str_("ab"), np.array("abc", ">U5"), np.array("abc", "U9")):
            writer.append({"u": value, "s": np.array([b"", b"z"], "S7"), "x": 1})
        for u, s, what in (
            ("abcd", [b"a", b"b"], r"length 4 at \('u',\).*at most 3.*\(U3\).*np.array"),
            ("abc", [b"a", b"xyz"], r"length 3 at \('s',\).*at most 2.*\(S2\).*np.array"),
            ("abc", ["a", "b"], r"\('s',\). Got string<U1> but expected string<S2>"),
            (b"abc", [b"a", b"b"], r"\('u',\). Got string<S3> but expected string<U3>"),
            (1.0, [b"a", b"b"], r"\('u',\). Got double but expected string<U3>"),
            ("abc", [b"a"], "incompatible shape"),
        ):
            with pytest.raises(errors.SignatureError, match=what):
                writer.append({"u": u, "s": np.array(s), "x": 1})
        with pytest.raises(errors.SignatureError, match="Got string<U1> but expected int64"):
            writer.append({"u": "a", "s": np.array([b"a", b"b"]), "x": "1"})
        history = writer.history
        writer.create_item("t", 1.0, {"u": history["u"][-4:], "s": history["s"][-4:]})
    data = client.sample_batch("t", 1).data
    assert data["u"].tolist() == [["a", "ab", "abc", "abc"]]
    assert data["s"].tolist() == [[[b"", b"z"]] * 4]


def test_objects_and_text_without_a_width_are_refused(make_client: MakeClient) -> None:
    _, client = make_client([table()])
    objects = np.array(["a", "bc"], object)
    with client.trajectory_writer(1) as writer:
        for call in (
            lambda: writer.append({"x": objects}),
            lambda: client.insert({"x": objects}, {"t": 1.0}),
            lambda: client.insert_batch("t", {"x": objects}),
        ):
            with pytest.raises(errors.ArgumentTypeError, match=r'np.array\(x, "U16"\)'):
                call()
    for dtype in (object, str, bytes, "S", "U"):
        with pytest.raises(errors.SignatureError, match=r'"U16"'):
            reverb.TensorSpec((), dtype)


def test_an_item_must_have_the_width_of_the_signature(make_client: MakeClient) -> None:
    signature = [reverb.TensorSpec((1,), "S6")]
    _, client = make_client([table(signature=signature), table("other")])
    with client.trajectory_writer(1) as writer:
        writer.append({"name": b"abc"})  # at another path: the first step sets it
        with pytest.raises(
            errors.SignatureError, match=r'string<S6> \[1\].*string<S3> \[1\].*np.array\(x, "S6"\)'
        ):
            writer.create_item("t", 1.0, [writer.history["name"][-1:]])
    with client.trajectory_writer(1) as writer:
        writer.append({"name": np.array(b"abc", "S6")})
        writer.create_item("t", 1.0, [writer.history["name"][-1:]])
    assert client.sample_batch("t", 1).data[0].tolist() == [[b"abc"]]


def test_insert_and_insert_batch_pad_to_the_signature(make_client: MakeClient) -> None:
    signature = {"x": reverb.TensorSpec((1,), "U6"), "y": reverb.TensorSpec((1,), np.int64)}
    rows = {"x": reverb.TensorSpec((), "U6"), "y": reverb.TensorSpec((), np.int64)}
    server, client = make_client(
        [table(signature=signature), table("rows", signature=rows), table("free")]
    )
    for i, word in enumerate(WORDS * 2):
        client.insert({"x": word, "y": i}, {"t": 1.0, "free": 1.0})
    client.insert({"x": "unsigned", "y": 9}, {"free": 1.0})
    keys = client.insert_batch("rows", {"x": np.array(WORDS), "y": np.arange(4)})
    assert [int(k) for k in client.sample_batch("rows", 1).info.key] == [keys[0]]
    got = [s.data for s in client.fetch("rows", keys)]
    assert [d["x"][()] for d in got] == WORDS
    assert {d["x"].dtype for d in got} == {np.dtype("U6")}
    infos = client.server_info()
    assert infos["t"].current_size == 8 and infos["free"].current_size == 9
    assert infos["t"].signature == signature
    for data in ({"x": "longer!", "y": 1}, {"x": b"bytes", "y": 1}, {"x": 1, "y": 1}):
        with pytest.raises(errors.SignatureError):
            client.insert(data, {"t": 1.0})
        with pytest.raises(errors.SignatureError):
            client.insert_batch("rows", {k: np.array([v]) for k, v in data.items()})
    assert client.server_info()["rows"].current_size == 4
    server.check()


def test_a_new_width_in_a_table_without_signature(make_client: MakeClient) -> None:
    signature = {"x": reverb.TensorSpec((1,), "S3")}
    _, client = make_client([table(), table("other", signature=signature)])
    for word in (b"ab", b"abcde", b"x", b"cd"):
        client.insert({"x": word}, {"t": 1.0})
    items = [next(iter(client.sample("t", emit_timesteps=False)))]
    assert items[0].data[0].tolist() == [b"ab"] and items[0].data[0].dtype == "S2"
    keys = list(client.keys("t"))
    assert [s.data["x"].tolist() for s in client.fetch("t", keys)] == [
        [b"ab"],
        [b"abcde"],
        [b"x"],
        [b"cd"],
    ]
    with client.trajectory_writer(1) as writer:  # too long for the other table, and not for this
        writer.append({"x": b"abcdef"})
        writer.create_item("t", 1.0, {"x": writer.history["x"][-1:]})
        with pytest.raises(errors.SignatureError, match="S6"):
            writer.create_item("other", 1.0, {"x": writer.history["x"][-1:]})


def test_the_same_column_in_place_and_in_other_writers(make_client: MakeClient) -> None:
    _, client = make_client([table(signature=columns(2, "U8"))])
    spec = {k: reverb.TensorSpec(v.shape[1:], v.dtype) for k, v in columns(2, "U8").items()}
    with client.trajectory_writer(2) as writer:
        for word in ("one", "\u03a9"):
            with writer.next_step(spec=spec) as place:
                place["text"][...] = word
                place["pair"][...] = [b"a", b"b"]
                place["x"][...] = 1
        writer.create_item("t", 1.0, {k: c[-2:] for k, c in writer.history.items()})
    assert client.sample_batch("t", 1).data["text"].tolist() == [["one", "\u03a9"]]
    writer_of_old = client.writer(2)
    with writer_of_old as old:
        for word in ("one", "two"):
            old.append(step(word, 0))
        with pytest.raises(errors.SignatureError, match="length 9"):
            old.append(step("ninechars", 0))
        old.create_item("t", 2, 1.0)
    assert client.sample_batch("t", 2).data["text"].shape == (2, 2)


def test_structured_writers_and_signatures_that_they_infer(make_client: MakeClient) -> None:
    pattern = structured.pattern_from_transform(
        step("", 0), lambda ref: {"word": ref["text"][-2:], "last": ref["text"][-1]}
    )
    config = structured.create_config(pattern, "t")
    spec = {k: reverb.TensorSpec(v.shape[1:], v.dtype) for k, v in columns(2, "U8").items()}
    signature = structured.infer_signature([config], spec)
    assert signature["word"].dtype == np.dtype("U8") and signature["last"].shape == ()
    _, client = make_client([table(signature=signature)])
    writer = client.structured_writer([config])
    for i, word in enumerate(WORDS):
        writer.append({**step(word, i), "text": np.array(word, "U8")})
    writer.flush()
    batch = client.sample_batch("t", 3).data
    assert batch["last"].dtype == np.dtype("U8")
    found = [s.data for s in client.fetch("t", list(client.keys("t")))]
    assert [d["last"][()] for d in found] == WORDS[1:]
    assert [d["word"].tolist() for d in found] == [WORDS[i : i + 2] for i in range(3)]
    with pytest.raises(errors.SignatureError, match="length 9"):
        writer.append(step("ninechars", 0))


def test_datasets_of_numpy_and_padding(make_client: MakeClient) -> None:
    _, client = make_client([table(signature={"x": reverb.TensorSpec((None,), "S4")})])
    with client.trajectory_writer(3) as writer:
        for i, word in enumerate((b"a", b"bcde", b"")):
            writer.append({"x": word})
            writer.create_item("t", 1.0, {"x": writer.history["x"][-i - 1 :]})
    samples = [next(iter(client.fetch("t", [k]))) for k in client.keys("t")]
    padded = pad_batch(samples, value=b"")
    assert padded.data["x"].tolist() == [
        [b"a", b"", b""],
        [b"a", b"bcde", b""],
        [b"a", b"bcde", b""],
    ]
    assert padded.lengths["x"].tolist() == [1, 2, 3]
    dataset = reverb.dataset.NumpyTrajectoryDataset.from_table_signature(
        client.server_address, "t", max_in_flight_samples_per_worker=1, max_samples=1
    )
    (sample,) = list(dataset)
    assert sample.data["x"].tolist() == [b"a"] and sample.data["x"].dtype == np.dtype("S4")
    for dtype, fits in ((object, True), (bytes, True), ("S4", True), ("S5", False)):
        dataset = reverb.dataset.NumpyTrajectoryDataset(
            client.server_address,
            "t",
            {"x": dtype},
            {"x": (None,)},
            max_in_flight_samples_per_worker=1,
            max_samples=1,
        )
        if fits:
            assert next(iter(dataset)).data["x"].tolist() == [b"a"]
        else:
            with pytest.raises(errors.InvalidArgumentError, match=r"string<S5>.*string<S4>"):
                next(iter(dataset))


def test_what_is_dumped_is_text(make_client: MakeClient, tmp_path: Path) -> None:
    server, client = make_client([table()])
    for word in ("ab", "c"):
        client.insert({"x": np.array(word, "U4")}, {"t": 1.0})
    name = server.address.removeprefix("shm://")
    assert main(["dump", name, "-o", str(tmp_path / "out")]) == 0
    with np.load(tmp_path / "out" / "t.npz") as arrays:
        assert arrays["data/0/x"].tolist() == ["ab", "c"]


@pytest.mark.parametrize("compress", ["none", "lz4"])
def test_text_survives_checkpoints_and_compression(
    make_client: MakeClient, tmp_path: Path, compress: str
) -> None:
    def tables() -> list[reverb.Table]:
        return [table(signature=columns(1, "U8"), compress=compress), table("free")]

    keep = reverb.checkpointers.DefaultCheckpointer(str(tmp_path))
    server, client = make_client(tables(), checkpointer=keep)
    for i, word in enumerate(WORDS):
        client.insert(step(word, i), {"t": 1.0, "free": 1.0})
    client.checkpoint()
    server.stop()
    _, again = make_client(tables(), checkpointer=keep)
    for name in ("t", "free"):
        found = [s.data["text"] for s in again.fetch(name, list(again.keys(name)))]
        assert [d.tolist() for d in found] == [[word] for word in WORDS]
    assert again.server_info()["t"].signature == columns(1, "U8")
    again.insert(step("more", 0), {"t": 1.0})
