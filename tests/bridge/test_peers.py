"""Peers that are not what they should be: they are told, the log says it, nobody else notices."""

from __future__ import annotations

import logging
import os
import resource
import socket
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmreplay as reverb
from shmreplay import errors, limits, rate_limiters, selectors
from shmreplay.bridge import protocol
from shmreplay.bridge.auth import ClientKeys, ServerKeys, keygen
from shmreplay.bridge.link_thread import LinkThread
from shmreplay.bridge.protocol import HEADER, Kind
from shmreplay.bridge.server import BridgeServer
from shmreplay.bridge.wire import Writer
from tests.bridge.peer import Peer, hello_body
from tests.bridge.test_client import wait_until
from tests.conftest import free_port

TABLE = "table"

Serve = Callable[..., reverb.Server]
Connect = Callable[..., reverb.Client]


def table() -> reverb.Table:
    return reverb.Table(TABLE, selectors.Fifo(), selectors.Fifo(), 100, rate_limiters.MinSize(1))


@pytest.fixture
def server(serve: Serve) -> reverb.Server:
    return serve(table())


def test_bind_to_other_hosts_needs_keys(make_server: Callable[..., reverb.Server]) -> None:
    for bind in ("0.0.0.0", "*", "192.0.2.1", "::"):
        with pytest.raises(errors.InvalidArgumentError, match="insecure=True"):
            make_server([table()], port=free_port(), bind=bind)
    server = make_server([table()], port=free_port(), bind="0.0.0.0", insecure=True)
    with reverb.Client(f"tcp://127.0.0.1:{server.port}") as client:
        assert TABLE in client.server_info()


def test_what_others_reach_is_a_process_of_its_own(
    make_server: Callable[..., reverb.Server],
) -> None:
    """Nothing but the memory of its process bounds a message without end."""
    outside: dict[str, Any] = {"bind": "0.0.0.0", "insecure": True}
    server: Any = make_server([table()], port=free_port(), **outside)
    (pid,) = server._bridge.pids
    assert pid != os.getpid()
    assert resource.prlimit(pid, resource.RLIMIT_DATA)[0] <= limits.BRIDGE_PROCESS_BYTES
    for options in ({**outside, "bridge_workers": 0}, {}):
        server = make_server([table()], port=free_port(), **options)
        assert isinstance(server._bridge, BridgeServer)


def test_address_that_cannot_be_bound(make_server: Callable[..., reverb.Server]) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="cannot be used"):
        make_server([table()], port=free_port(), bind="192.0.2.1", insecure=True)


def test_a_message_before_hello(server: reverb.Server, caplog: pytest.LogCaptureFixture) -> None:
    with Peer(server.port) as peer:
        header, reader = peer.request(Kind.STATS, Writer())
        assert header.kind == Kind.REFUSED
        assert "before HELLO" in str(protocol.decode_error(reader))
    assert "a peer was dropped" in caplog.text


def test_another_version(server: reverb.Server, caplog: pytest.LogCaptureFixture) -> None:
    with Peer(server.port) as peer:
        assert peer.hello(versions=(protocol.VERSION + 1, 9)).kind == Kind.REFUSED
    with Peer(server.port) as peer:
        peer.send([HEADER.pack(protocol.MAGIC, 1, Kind.HELLO, 0, 0, 0, 0, 0), b""])
        _, reader = peer.receive()
        error = protocol.decode_error(reader)
        assert type(error) is errors.VersionMismatchError
        assert "version 1" in str(error)
    with Peer(server.port) as peer:
        assert peer.hello(versions=(1, protocol.VERSION - 1)).kind == Kind.REFUSED
    assert caplog.text.count("a peer was dropped") == 3


def test_a_server_of_another_version(stack: Any) -> None:
    import zmq

    context: zmq.Context[Any] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    client = reverb.Client(f"tcp://127.0.0.1:{port}")
    try:
        import threading

        def answer() -> None:
            peer, *_ = router.recv_multipart()
            router.send_multipart(
                [peer, HEADER.pack(protocol.MAGIC, 7, Kind.WELCOME, 0, 0, 0, 0, 0), b""]
            )

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(errors.VersionMismatchError, match="version 7"):
            client.server_info()
        thread.join()
    finally:
        client.close()
        router.close(0)
        context.term()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b"x" * HEADER.size, b""],
        [HEADER.pack(protocol.MAGIC, 2, 99, 0, 0, 0, 0, 0), b""],
        [HEADER.pack(protocol.MAGIC, 2, Kind.STATS, 1, 0, 1, 0, 0), b""],
        [HEADER.pack(protocol.MAGIC, 2, Kind.STATS, 0, 0, 5, 0, 0), b""],
        [HEADER.pack(protocol.MAGIC, 2, Kind.STATS, 0, 0, 1, 0, 2**40), b""],
        [HEADER.pack(protocol.MAGIC, 2, Kind.STATS, 0, 2**31, 1, 0, 0), b""],
        [HEADER.pack(protocol.MAGIC, 2, Kind.STATS, 0, 0, 1, 0, 4), b"left"],
        [HEADER.pack(protocol.MAGIC, 2, Kind.WELCOME, 0, 0, 0, 0, 0), b""],
        [HEADER.pack(protocol.MAGIC, 2, Kind.INFO, 0, 0, 1, 0, 2), b"\xff\x00"],
        [HEADER.pack(protocol.MAGIC, 2, Kind.WRITE, 0, 0, 1, 0, 4), b"\x09\x00\x00\x00"],
        [b"x"] * (limits.BRIDGE_PARTS + 100),
    ],
    ids=range(13),
)
def test_garbage(
    server: reverb.Server,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    frames: list[bytes],
) -> None:
    client = connect(server)
    client.server_info()
    with Peer(server.port) as peer:
        assert peer.hello().kind == Kind.WELCOME
        peer.send(frames)
        assert peer.is_dropped()
        # From here on nothing that it says is heard.
        peer.send(protocol.encode(Kind.HELLO, Writer()))
        client.insert_batch(TABLE, {"x": np.zeros(1)})
        assert not peer.socket.poll(0)
    assert caplog.text.count("a peer was dropped") == 1
    assert client.server_info()[TABLE].current_size == 1


def test_bytes_that_are_not_of_zeromq(server: reverb.Server, connect: Connect) -> None:
    client = connect(server)
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(os.urandom(4096))
        client.insert_batch(TABLE, {"x": np.zeros(1)})
    assert client.server_info()[TABLE].current_size == 1


def test_a_frame_that_is_too_large_ends_its_connection(
    server: reverb.Server, connect: Connect
) -> None:
    client = connect(server)
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(20)
        # ZMTP 3.0: greeting with the NULL mechanism, READY, then a frame of 2**62 bytes.
        raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31))
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        raw.sendall(b"\x04" + bytes([len(ready)]) + ready + b"\x02" + (2**62).to_bytes(8, "big"))
        while raw.recv(4096):
            pass  # until it is closed
    client.insert_batch(TABLE, {"x": np.zeros(1)})


def test_what_does_not_fit_a_message_is_refused_before_it_is_sent(
    server: reverb.Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(server)
    client.server_info()
    monkeypatch.setattr(limits, "BRIDGE_MESSAGE_BYTES", 10_000)
    with pytest.raises(errors.InvalidArgumentError, match="Make several calls with less"):
        client.insert_batch(TABLE, {"x": np.zeros((20, 1000))})
    client.insert_batch(TABLE, {"x": np.zeros((1, 1000))})


def test_a_sample_that_does_not_fit_a_message_is_an_error_and_takes_nothing(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(serve(reverb.Table.queue(TABLE, 100)))
    for i in range(10):
        client.insert_batch(TABLE, {"x": np.full((1, 1000), i)})
    monkeypatch.setattr(limits, "BRIDGE_MESSAGE_BYTES", 50_000)
    with pytest.raises(errors.InvalidArgumentError, match="do not fit one message"):
        client.sample_batch(TABLE, 10, timeout=5)
    got = [client.sample_batch(TABLE, 5, timeout=5).data["x"][:, 0].tolist() for _ in range(2)]
    assert got == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_too_many_requests_at_once(serve: Serve, connect: Connect) -> None:
    server = serve(table())
    client = connect(server)
    with Peer(server.port) as peer:
        peer.hello()
        body = Writer()
        body.u16(0)
        body.u32(1)
        body.timeout(None)
        for sequence in range(1, limits.BRIDGE_REQUESTS + 2):  # of an empty table: all wait
            peer.send(protocol.encode(Kind.SAMPLE, body, sequence))
        assert peer.is_dropped()
    client.insert_batch(TABLE, {"x": np.zeros(1)})
    assert client.server_info()[TABLE].rate_limiter_info.sample_stats.completed == 0


def test_batches_that_wait_are_bounded_by_what_they_were_decompressed_to(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BRIDGE_SESSION_BYTES", 2**22)
    server = serve(reverb.Table.queue(TABLE, 1))
    client, reader = connect(server, compress=True), connect(server)
    batch = {"x": np.zeros((2, 2**20), np.float32)}  # 8 MiB, and a few kB on the way
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.insert_batch, TABLE, batch, timeout=60)
        assert len(reader.sample_batch(TABLE, 1, timeout=60).data["x"]) == 1
        # The first row is taken, the second in: fill the table, so that the next batch waits.
        assert len(first.result(60)) == 2
        second = pool.submit(client.insert_batch, TABLE, batch, timeout=60)
        deadline = time.monotonic() + 60
        while True:  # until the second waits at the server
            try:
                client.insert_batch(TABLE, {"x": np.zeros((1, 2**20), np.float32)}, timeout=0)
            except errors.ArenaFullError as error:
                assert "decompressed; expected at most 4194304" in str(error)
                break
            except errors.DeadlineExceededError:
                assert time.monotonic() < deadline
        assert client.server_info()[TABLE].current_size == 1
        for _ in range(3):
            reader.sample_batch(TABLE, 1, timeout=60)
        assert len(second.result(60)) == 2
    client.insert_batch(TABLE, {"x": batch["x"][:1]}, timeout=60)


def test_a_peer_that_does_not_read_costs_nobody_else_anything(
    server: reverb.Server, connect: Connect
) -> None:
    client = connect(server)
    client.insert_batch(TABLE, {"x": np.zeros((50, 10_000))})
    with Peer(server.port) as peer:
        peer.hello()
        body = Writer()
        body.u16(0)
        body.u32(50)
        body.timeout(0.0)
        for sequence in range(1, 301):  # 1.2 GB
            peer.send(protocol.encode(Kind.SAMPLE, body, sequence))
        for _ in range(20):
            assert len(client.sample_batch(TABLE, 10, timeout=20).data["x"]) == 10
    # What is drawn for it is bounded.
    done = client.server_info()[TABLE].rate_limiter_info.sample_stats.completed - 200
    assert done * 80_000 <= limits.BRIDGE_SESSION_BYTES + 50 * 80_000


def open_writer(peer: Peer, number: int) -> Kind:
    body = Writer()
    body.u32(number)
    body.u32(1)
    body.u8(0)
    return peer.request(Kind.WRITER_OPEN, body)[0].kind


def test_a_host_cannot_have_all_clients(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BRIDGE_SESSIONS", 8)
    server = serve(table())
    with ExitStack() as stack:

        def say_hello(source: str) -> Kind:
            return stack.enter_context(Peer(server.port, source)).hello().kind

        assert [say_hello("127.0.0.1") for _ in range(5)] == 4 * [Kind.WELCOME] + [Kind.REFUSED]
        assert [say_hello("127.0.0.2") for _ in range(3)] == 2 * [Kind.WELCOME] + [Kind.REFUSED]
        assert say_hello("127.0.0.3") == Kind.WELCOME
        # One that goes makes room, and what is said to whom gets none says why.
        peer = stack.enter_context(Peer(server.port, "127.0.0.4"))
        assert peer.hello().kind == Kind.WELCOME
        late = stack.enter_context(Peer(server.port, "127.0.0.4"))
        late.send(protocol.encode(Kind.HELLO, hello_body(late.identity)))
        header, reader = late.receive()
        error = protocol.decode_error(reader)
        assert header.kind == Kind.REFUSED and isinstance(error, errors.StoreLimitError)
        assert "1 of peer 127.0.0.4, 0 left" in str(error)


def test_a_host_cannot_have_all_writers(serve: Serve, connect: Connect) -> None:
    server = serve(table(), capacity=8 << 20)  # 128 of them
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(server.port, "127.0.0.2")) for _ in range(2)]
        for peer in peers:
            assert peer.hello().kind == Kind.WELCOME
        kinds = [open_writer(peers[i % 2], 1 + i // 2) for i in range(70)]
        assert kinds == 64 * [Kind.REPLY] + 6 * [Kind.FAILURE]
        client = connect(server)
        with client.trajectory_writer(1) as writer:
            writer.append({"x": 1})
        body = Writer()
        body.u32(1)
        assert peers[0].request(Kind.WRITER_CLOSE, body)[0].kind == Kind.REPLY
        assert open_writer(peers[1], 100) == Kind.REPLY
        assert open_writer(peers[1], 101) == Kind.FAILURE


def test_a_session_of_somebody_else_is_not_found_by_guessing(
    server: reverb.Server, connect: Connect
) -> None:
    connect(server).server_info()
    with Peer(server.port) as peer:
        assert peer.hello(generation=12345).kind == Kind.WELCOME
        header, _ = peer.request(Kind.STATS, Writer())
        assert header.kind == Kind.REFUSED


# ---------------------------------------------------------------------- keys


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    paths = {}
    (tmp_path / "allowed").mkdir()
    for name in ("server", "ann", "eve"):
        public, secret = keygen(tmp_path / name, name)
        paths[name], paths[name + ".secret"] = public, secret
    allowed = tmp_path / "allowed" / "ann.key"
    allowed.write_text(Path(paths["ann"]).read_text())
    paths["allowed"] = str(tmp_path / "allowed")
    return paths


def test_secret_keys_are_their_owner_s_alone(keys: dict[str, str]) -> None:
    path = keys["ann.secret"]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    os.chmod(path, 0o640)
    with pytest.raises(errors.AuthenticationError, match="0o640"):
        with reverb.Client("tcp://127.0.0.1:1", remote(keys, "ann")) as client:
            client.server_info()
    with pytest.raises(errors.InvalidArgumentError, match="there already"):
        keygen(Path(path).parent, "ann")


def remote(keys: dict[str, str], name: str, server: str = "server") -> Any:
    return reverb.RemoteOptions(timeout=60.0, keys=ClientKeys(keys[name + ".secret"], keys[server]))


def test_only_known_keys_get_in(
    serve: Serve,
    keys: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.WARNING)
    refusal = LinkThread._refusal

    def once_is_enough(link: LinkThread) -> str:
        link.timeout = 0.0  # else it would try again for as long as it may
        return refusal(link)

    monkeypatch.setattr(LinkThread, "_refusal", once_is_enough)
    server = serve(table(), auth=ServerKeys(keys["server.secret"], keys["allowed"]))
    address = f"tcp://127.0.0.1:{server.port}"
    with reverb.Client(address, remote(keys, "ann")) as client:
        client.insert_batch(TABLE, {"x": np.arange(100_000.0)[None]})
        assert client.sample_batch(TABLE, 1).data["x"].sum() == np.arange(100_000).sum()
        with reverb.Client(address, remote(keys, "eve")) as other:
            with pytest.raises(errors.AuthenticationError, match="does not know this client's key"):
                other.server_info()
        for options in (
            reverb.RemoteOptions(timeout=60.0),
            remote(keys, "ann", server="eve"),
        ):
            with reverb.Client(address, options) as other:
                with pytest.raises(errors.StoreNotFoundError, match="key"):
                    other.server_info()
        assert client.server_info()[TABLE].current_size == 1
    wait_until(lambda: "turned away in the handshake" in caplog.text)


def test_keys_that_cannot_be_used(serve: Serve, keys: dict[str, str]) -> None:
    for wrong in ("server.key_secret", ClientKeys(keys["ann.secret"], keys["server"])):
        with pytest.raises(errors.ArgumentTypeError, match=r"ServerKeys\(secret, clients\)"):
            serve(table(), auth=wrong)
        with pytest.raises(errors.ArgumentTypeError, match="ServerKeys"):
            serve(table(), auth=wrong, bridge_workers=1)
    for secret, allowed in (("nowhere", keys["allowed"]), (keys["server.secret"], "nowhere")):
        with pytest.raises(errors.AuthenticationError, match="nowhere"):
            serve(table(), auth=ServerKeys(secret, allowed))
    with pytest.raises(errors.AuthenticationError, match="secret key in it"):
        os.chmod(keys["server"], 0o600)
        serve(table(), auth=ServerKeys(keys["server"], keys["allowed"]))
