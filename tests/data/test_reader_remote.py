"""URLs: a local S3-compatible server through Arrow, and the memory file system of fsspec."""

from __future__ import annotations

import logging
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from helpers.reader import contents, examples_of, pack

import thermocline as tc
from thermocline.data.follow import FollowReader
from thermocline.errors import DataError

ROWS = [f"{i % 2},{i},u{i % 9}\n" for i in range(400)]
HEADER = "label,id,user\n"


def files() -> dict[str, bytes]:
    """Content by name: plain and compressed files in folders."""
    text = [(HEADER + "".join(part)).encode() for part in (ROWS[:150], ROWS[150:300], ROWS[300:])]
    return {
        "plain/day=1/a.csv": text[0],
        "plain/day=2/a.csv": text[1],
        "plain/day=2/b c.csv": text[2],
        "packed/a.csv.gz": pack(text[0], ".gz"),
        "packed/b.csv.zst": pack(text[1], ".zst"),
        "packed/c.csv.gz": pack(text[2], ".gz"),
    }


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Start the server; return the URL query that addresses it."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket="ads")
        for name, body in files().items():
            client.put_object(Bucket="ads", Key=name, Body=body)
        yield f"endpoint_override={urllib.parse.quote(f'{host}:{port}')}&scheme=http&region=us-east-1"
    server.stop()


@pytest.fixture
def memory() -> Iterator[None]:
    filesystem: Any = fsspec.filesystem("memory")
    for name, body in files().items():
        filesystem.pipe_file(f"/ads/{name}", body)
    yield
    filesystem.rm("/ads", recursive=True)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    for name, body in files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(body)
    return tmp_path


PATTERNS = ["plain/**/*.csv", "plain/day=[12]/*.csv", "packed", "packed/*.csv.*", "plain/day=2/b c.csv"]


def compare(url: str, query: str, local: Path) -> None:
    """Check that remote files give the same batches as local files, shuffled and from a position."""
    for pattern in PATTERNS:
        options: dict[str, Any] = {"batch_size": 37, "block_bytes": 500, "shuffle_buffer": 100, "shuffle": True}
        remote = tc.Reader(f"{url}/{pattern}{query}", **options)
        batches = list(tc.Reader(str(local / pattern), **options))
        assert [contents(batch) for batch in remote] == [contents(batch) for batch in batches]
        assert [contents(batch) for batch in remote.seek(batches[1].position)] == [contents(b) for b in batches[2:]]


def test_fsspec_memory(memory: None, local: Path) -> None:
    compare("memory://ads", "", local)


def test_s3(s3: str, local: Path) -> None:
    compare("s3://ads", f"?{s3}", local)


def test_parquet_on_s3(s3: str, tmp_path: Path) -> None:
    import boto3

    tc.SyntheticAds(keys=1000, fields=4, examples=500, seed=3).write(tmp_path / "a.parquet")
    host = urllib.parse.unquote(s3.split("&")[0].split("=")[1])
    client: Any = boto3.client("s3", endpoint_url=f"http://{host}")
    client.upload_file(str(tmp_path / "a.parquet"), "ads", "parquet/a.parquet")
    options: dict[str, Any] = {"batch_size": 64, "raw_keys": True}
    remote = tc.Reader(f"s3://ads/parquet/a.parquet?{s3}", **options)
    assert examples_of(remote) == examples_of(tc.Reader(tmp_path / "a.parquet", **options))


def test_errors_name_the_url_without_its_query(s3: str) -> None:
    for name, message in [
        ("s3://ads/plain/none.csv", r"s3://ads/plain/none\.csv: no such file"),
        ("s3://ads/none/*.csv", r"s3://ads/none/\*\.csv matches no file"),
    ]:
        with pytest.raises(DataError, match=message) as error:
            tc.Reader(f"{name}?{s3}", batch_size=2)
        assert "endpoint" not in str(error.value)


def test_remote_file_changed(memory: None) -> None:
    reader = tc.Reader("memory://ads/plain/day=1/a.csv", batch_size=10)
    filesystem: Any = fsspec.filesystem("memory")
    filesystem.pipe_file("/ads/plain/day=1/a.csv", b"label,id,user\n1,2,3\n")
    with pytest.raises(DataError, match=r"memory://\S*a\.csv changed while it was read"):
        list(reader)


def test_follow_of_a_url(memory: None) -> None:
    filesystem: Any = fsspec.filesystem("memory")
    for day in (1, 2):
        filesystem.pipe_file(f"/stream/day={day}/a.csv", f"label,at,id\n1,{day},7\n".encode())
        filesystem.pipe_file(f"/stream/day={day}/_b.csv", b"label,at,id\n1,9,7\n")
    filesystem.pipe_file("/stream/day=1/_SUCCESS", b"")
    options: dict[str, Any] = {"follow": True, "follow_idle": 0.05, "time": "at"}
    data = tc.Data(train="memory://stream/day=*/*.csv", follow_complete="_SUCCESS", **options)
    reader = FollowReader(data, batch_size=4, tensors=False)
    assert [batch.time.tolist() for batch in reader] == [[1]]  # type: ignore[union-attr]
    filesystem.pipe_file("/stream/day=2/_SUCCESS", b"")
    (first, second) = reader
    assert second.time.tolist() == [2]  # type: ignore[union-attr]
    filesystem.rm("/stream/day=1", recursive=True)
    assert [batch.position for batch in reader.seek(first.position)] == [second.position]
    filesystem.rm("/stream", recursive=True)
