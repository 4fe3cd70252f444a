"""Typed messages between ranks: round trip, malformed bytes, bytes that a broadcast sends, and errors."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import socket
import struct
from pathlib import Path
from typing import Any, cast

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from helpers.ranks import run_failing_ranks, run_ranks
from hypothesis import HealthCheck, example, given, settings, strategies as st

import thermocline as tc
from thermocline.distributed import messages
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.communicator import Communicator, Groups
from thermocline.distributed.sharded_table import ShardedTable

PACKAGE = Path(tc.__file__).parent
NUMPY_DTYPES = [name for name in messages.DTYPES if name != "bfloat16"]

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats() | st.text(st.characters()) | st.binary()
)
ARRAYS = hnp.arrays(st.sampled_from(NUMPY_DTYPES), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
TENSORS = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(getattr(torch, dtype)),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    st.sampled_from(messages.DTYPES),
)
VALUES = st.recursive(
    SCALARS | ARRAYS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(SCALARS | st.tuples(SCALARS, SCALARS), inner, max_size=4)
    ),
    max_leaves=12,
)
FAST = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def same(a: Any, b: Any) -> bool:
    """Compare types and bits."""
    if type(a) is not type(b):
        return False
    match a:
        case np.ndarray():
            return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
        case torch.Tensor():
            return a.dtype == b.dtype and a.shape == b.shape and bytes(messages.encode(a)) == bytes(messages.encode(b))
        case float():
            return np.float64(a).tobytes() == np.float64(b).tobytes()
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
        case dict():
            return len(a) == len(b) and all(
                same(k, m) and same(x, y) for (k, x), (m, y) in zip(a.items(), b.items(), strict=True)
            )
    return bool(a == b)


@FAST
@given(VALUES)
def test_round_trip(value: Any) -> None:
    assert same(messages.decode(messages.encode(value)), value)


def test_converted_values() -> None:
    swapped = np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2]
    assert messages.decode(messages.encode(swapped)).tolist() == swapped.tolist()
    assert same(messages.decode(messages.encode([np.float32(0.5), np.int64(7), np.bool_(True)])), [0.5, 7, True])
    assert same(messages.decode(messages.encode(torch.arange(6).reshape(2, 3).T)), torch.arange(6).reshape(2, 3).T)
    received = messages.decode(messages.encode(np.zeros(3)))
    received += 1  # it is writable
    assert received.sum() == 3


class Exploit:
    """Runs code when pickle loads it."""

    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


@pytest.mark.parametrize(
    "value",
    [Exploit(), {1}, object, 1j, np.array([Exploit()]), np.array(["text"]), np.longdouble(1), torch.zeros(1) * 1j],
)
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        messages.encode({"value": [value]})


def test_limits_of_the_sender() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        messages.encode(loop)
    with pytest.raises(ValueError, match="an integer of 2040 bits"):
        messages.encode(1 << 2039)
    assert messages.decode(messages.encode(-(1 << 2038))) == -(1 << 2038)


@FAST
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    check_bounded(data)


@FAST
@example([np.empty((0, 0, 0, 0)), None], [(159, b"\0\0\0\0\0\0\x10")])  # NumPy counts bytes, not elements
@given(VALUES, st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=9)), min_size=1, max_size=4))
def test_changed_messages(value: Any, changes: list[tuple[int, bytes]]) -> None:
    data = bytes(messages.encode(value))
    for position, patch in changes:
        at = position % (len(data) + 1)
        data = data[:at] + patch + data[at + len(patch) // 2 :]
    check_bounded(data)


def check_bounded(data: bytes) -> None:
    """Decode: either a value that encodes again, or `MessageError`. Never another error, never more memory."""
    try:
        value = messages.decode(data)
    except messages.MessageError:
        return
    assert len(messages.encode(value)) <= 2 * len(data) + 2


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "1 bytes expected, 0 left"),
        (b"?", "unknown tag"),
        (b"NN", "1 bytes follow its end"),
        (b"b" + (1 << 40).to_bytes(8, "little"), "1099511627776 bytes expected, 0 left"),
        (b"l" + (1 << 40).to_bytes(8, "little") + b"N", "1099511627776 items expected, 1 bytes left"),
        (b"m" + (1).to_bytes(8, "little") + b"l" + bytes(8) + b"N", "a list cannot be a key"),
        (b"m" + (2).to_bytes(8, "little") + b"NNNN", "key None occurs twice"),
        (b"s" + (1).to_bytes(8, "little") + b"\xff", "text is not UTF-8"),
        (b"a" + bytes([8, 1]) + (1 << 61).to_bytes(8, "little"), "bytes expected, 0 left"),
        (b"a" + bytes([8, 2]) + bytes(8) + (1 << 63).to_bytes(8, "little"), "an array has shape"),
        (b"a" + bytes([10, 0, 0, 0]), "a NumPy array cannot have dtype bfloat16"),
        (b"a" + bytes([0, 0, 2]), "a bool is neither 0 nor 1"),
        (b"a" + bytes([200, 0]), "unknown dtype 200"),
        (b"A" + bytes([1, 33]), "an array has 33 dimensions"),
        (b"l" + (1).to_bytes(8, "little"), "items expected"),
        ((b"l" + (1).to_bytes(8, "little")) * 200 + b"N", "nested more than 100 levels"),
    ],
)  # fmt: skip
def test_malformed_bytes(data: bytes, cause: str) -> None:
    with pytest.raises(messages.MessageError, match=cause):
        messages.decode(data)


# ---- collectives


def received_bytes() -> int:
    """Return the bytes that this process has received on its open TCP connections."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("<Q", info, 128)[0]  # tcpi_bytes_received
    return total


def collect(groups: Groups, size: int) -> Any:
    """Call every method once and count the bytes that this rank receives."""
    runner, rank = CollectiveRunner(groups.train), groups.topology.rank
    values = [{"rank": n, "tensor": torch.full((n,), n), "nothing": [None, ()]} for n in range(4)]
    assert same(runner.gather("a", lambda: values[rank]), values)
    assert same(runner.gather_to_rank0("b", lambda: values[rank]), values if rank == 0 else [])
    assert runner.run_all("d", lambda: object()) is not None
    content = np.random.default_rng(0).bytes(size)
    runner.barrier("e")
    before = received_bytes()
    assert runner.broadcast("f", lambda: content if rank == 0 else pytest.fail("not on rank 0")) == content
    return received_bytes() - before


def test_broadcast_sends_the_value_once_to_every_rank() -> None:
    size = 4_000_000
    received = run_ranks(((0, 1), (2, 3)), collect, size)
    assert received[0] < 100_000
    assert all(size <= count < size + 100_000 for count in received[1:]), received


def save(groups: Groups, folder: str) -> Any:
    """Save a run; return the messages of the save as (method, bytes sent by this rank)."""
    table = ShardedTable(4, tc.Adagrad(lr=0.1), groups=groups, mem="1MB", ssd_mem="16MB")
    model = torch.nn.Linear(100, 100)
    dense = torch.optim.Adam(model.parameters())
    sync = tc.DenseParameters.make(model.parameters(), dense, groups, tc.DenseSync(every=8, merge="params"))
    checkpoints = tc.Checkpoints(folder, [table], model, dense, dense_sync=sync)
    sent: list[tuple[str, int]] = []
    for name in ("all_gather_message", "gather_message", "broadcast_message"):
        method = getattr(Communicator, name)

        def record(self: Any, message: Any, doing: str, method: Any = method, name: str = name) -> Any:
            sent.append((name, len(message or b"")))
            return method(self, message, doing)

        setattr(Communicator, name, record)
    checkpoints.save(1)
    checkpoints.close()
    table.close()
    return sent


def test_save_sends_the_manifest_once(tmp_path: Path) -> None:
    """Ranks send their parts of the manifest to rank 0 only, which sends the whole once. States are in ranks' files."""
    sent = run_ranks(((0, 1),), save, str(tmp_path))
    path = max((tmp_path / "checkpoints").glob("*.json"))
    manifest, content = path.stat().st_size, json.loads(path.read_text())
    assert [size["bytes"] > 40_000 for size in content["files"].values()] == [True, True]
    assert sum(len(json.dumps(content[part])) for part in ("files", "states", "ranks")) < 2 * 500
    for messages_of_rank in sent:
        assert {name for name, _ in messages_of_rank} == {"gather_message", "broadcast_message"}
    large = [name for name, size in sent[0] if size > manifest / 2]
    assert large == ["broadcast_message"]
    assert sum(size for name, size in sent[1] if name == "broadcast_message") == 0


def fail(groups: Groups, method: str, failing: int, kind: str) -> Any:
    """Fail in one rank's work. Returns type and text of the error, and whether the ranks can go on."""
    runner, rank = CollectiveRunner(groups.train), groups.topology.rank

    def work() -> Any:
        if rank != failing:
            return rank
        if kind == "unsendable":
            return Exploit()
        raise tc.ConfigError("lr is -1: it must be positive")

    with pytest.raises((TypeError, tc.ThermoclineError)) as caught:
        getattr(runner, method)("testing", work)
    return type(caught.value).__name__, str(caught.value), runner.gather("continuing", lambda: rank)


@pytest.mark.parametrize(
    ("method", "failing", "kind"),
    [("gather", 1, "raise"), ("gather_to_rank0", 1, "unsendable"), ("broadcast", 0, "raise")],
)
def test_errors_reach_every_rank(method: str, failing: int, kind: str) -> None:
    name = "TypeError" if kind == "unsendable" else "ConfigError"
    text = "a Exploit cannot be sent" if kind == "unsendable" else "lr is -1"
    for rank, (raised, message, after) in enumerate(run_ranks(((0, 1),), fail, method, failing, kind)):
        assert raised == (name if rank == failing else "RankError")
        assert text in message
        if rank != failing:
            assert message.startswith(f"rank {failing} failed while testing: {name}: ")
        assert after == [0, 1]


def send_garbage(groups: Groups) -> None:
    """Rank 0 broadcasts bytes that are no message."""
    if groups.topology.rank == 0:
        groups.train.broadcast_message(b"\x80\x04K\x01.", "testing")  # pickle of 1
    else:
        CollectiveRunner(groups.train).broadcast("testing", lambda: None)


def test_pickled_bytes_are_refused() -> None:
    assert "MessageError: a message of another rank is malformed" in run_failing_ranks(((0, 1),), send_garbage)[1][1]


class HostileGroup:
    """A group whose first rank announces an exabyte."""

    def broadcast(self, values: torch.Tensor) -> None:
        values.fill_(1 << 60)


def test_oversized_message_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(messages.MessageError, match="has 1152921504606846976 bytes"):
        messages.broadcast_message(cast(Any, HostileGroup()), None)


# ---- the package


FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "multiprocessing"}
FORBIDDEN_CALLS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "read_pickle", "to_pickle", "allow_pickle"),
}


def pickle_uses(source: str) -> list[str]:
    """Return imports and names of a module that pickle, unpickle, or call torch.save, torch.load or numpy.load."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.partition(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] in FORBIDDEN_MODULES:
                    found.append(module)
                found += [a.name for a in names if module in ("torch", "numpy") and a.name in ("save", "load")]
                found += [a.name for a in names if a.name in FORBIDDEN_CALLS]
            case ast.Attribute(value=ast.Name(id="torch" | "np" | "numpy"), attr="save" | "load" as name):
                found.append(name)
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.keyword(arg=str(name)) if name in FORBIDDEN_CALLS:
                found.append(name)
    return found


def test_package_uses_no_pickle() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    assert {str(file): uses for file in files if (uses := pickle_uses(file.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "dist.all_gather_object(a, b)", "torch.load(f)", "np.load(f)",
     "from torch import load", "from torch.distributed import broadcast_object_list as b; b()", "f(allow_pickle=True)"],
)  # fmt: skip
def test_check_of_the_package_finds_uses(source: str) -> None:
    assert pickle_uses(source)
