"""`RedisWriter` against a real redis-server."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thermocline.serving import Publication
from thermocline.serving.redis_writer import RedisWriter

from .test_publication import DIM, Oracle, change, table_rows, wait_until


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    redis = pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on this machine: the Redis writer is not tested")
    folder = tmp_path_factory.mktemp("redis")
    socket = folder / "socket"
    command = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        client = redis.Redis(unix_socket_path=str(socket))
        wait_until(lambda: socket.exists() and client.ping())
        yield client
        client.shutdown(nosave=True)
        process.wait(20)


def rows_in(client: Any, prefix: str) -> Oracle:
    head = f"{prefix}:t[1]:".encode()
    names = [name for name in client.scan_iter() if name.startswith(head)]
    return {int.from_bytes(name[len(head) :], "little"): np.frombuffer(client.get(name), np.float32) for name in names}


def equal(left: Oracle, right: Oracle) -> bool:
    return left.keys() == right.keys() and all(left[key].tobytes() == right[key].tobytes() for key in left)


def test_redis_has_the_rows_of_the_current_version(client: Any, tmp_path: Path) -> None:
    rng = random.Random(0)
    oracle: Oracle = {}
    change(oracle, rng, 300)
    client.set("other", b"kept")
    with Publication(tmp_path) as publication:
        publication.publish_base([table_rows(oracle, name="t[1]")], step=0)
        writer = RedisWriter(tmp_path, client, prefix="a")
        assert writer.position is None
        for step in range(1, 12):
            written = []
            version = writer.sync(written.append)
            assert version is not None
            assert writer.position["step"] == step - 1
            assert equal(rows_in(client, "a"), oracle)
            assert writer.sync() is None
            kind = rng.choice(["delta", "two", "compact", "retire", "back"])
            for _ in range(2 if kind == "two" else 1):
                changed, deleted = change(oracle, rng, 20)
                publication.publish_delta([table_rows(changed, deleted, name="t[1]")], step=step)
            if kind == "compact":
                publication.compact()
            elif kind == "retire":
                publication.publish_base([table_rows(oracle, name="t[1]")], step=step)
                publication.retire(keep_bases=1)
            elif kind == "back":
                publication.roll_back(publication.current.number)
    assert client.get("other") == b"kept"
    assert DIM == 3


def test_a_delta_writes_only_what_changed(client: Any, tmp_path: Path) -> None:
    oracle: Oracle = {key: np.float32([key, 0, 0]) for key in range(1000)}
    with Publication(tmp_path) as publication:
        publication.publish_base([table_rows(oracle, name="t[1]")], step=0)
        writer = RedisWriter(tmp_path, client, prefix="b")
        writer.sync()
        publication.publish_delta([table_rows({7: np.float32([1, 2, 3])}, [8], name="t[1]")], step=1)
        written: list[int] = []
        writer.sync(written.append)
        assert sum(written) == 1
    oracle[7] = np.float32([1, 2, 3])
    del oracle[8]
    assert equal(rows_in(client, "b"), oracle)


def test_bad_prefixes_are_refused(tmp_path: Path) -> None:
    for prefix in ("", "a*", "a["):
        with pytest.raises(ValueError, match="prefix is"):
            RedisWriter(tmp_path, None, prefix=prefix)


def test_a_client_that_decodes_responses_is_refused(client: Any, tmp_path: Path) -> None:
    import redis

    with pytest.raises(ValueError, match="decode_responses=True"):
        RedisWriter(tmp_path, redis.Redis(decode_responses=True))
