"""Sources other than a list of files: Hive's partitions, Arrow datasets, and torch's IterableDataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import torch
from helpers.reader import examples_of, key
from helpers.run import Ads, World

import thermocline as tc
from thermocline.errors import DataError

SHOPS = [f"s{i}" for i in range(40)]
COUNTRIES = ["de", "fr", None, "a b"]


@pytest.fixture
def hive(tmp_path: Path) -> Path:
    """Two levels of partitions, written by Arrow: country, and day."""
    table = pa.table(
        {
            "label": [i % 2 for i in range(40)],
            "shop": SHOPS,
            "country": [COUNTRIES[i % 4] for i in range(40)],
            "day": [i % 3 for i in range(40)],
        }
    )
    partitioning = ds.partitioning(pa.schema([("country", pa.string()), ("day", pa.int64())]), flavor="hive")
    ds.write_dataset(table, tmp_path / "hive", format="parquet", partitioning=partitioning)
    (tmp_path / "hive" / "_metadata").write_text("not data")
    (tmp_path / "hive" / "notes").mkdir()
    (tmp_path / "hive" / "notes" / "a.txt").write_text("not a partition")
    return tmp_path / "hive"


def rows_of(batches: Any) -> dict[int, tuple[int, int]]:
    """Return the keys of country and day by the key of shop."""
    found = {}
    for _, (shop, country, day), _ in examples_of(batches):
        found[shop[0][0]] = (country[0][0], day[0][0])
    return found


EXPECTED = {
    key("shop", f"s{i}".encode()): (key("country", (COUNTRIES[i % 4] or "").encode()), key("day", b"%d" % (i % 3)))
    for i in range(40)
}


def test_hive_partitions_are_columns(hive: Path) -> None:
    reader = tc.Reader(hive, batch_size=7)
    assert reader.features.fields == ("shop", "country", "day")
    assert rows_of(reader) == EXPECTED
    assert len(reader) == 6
    shuffled = tc.Reader(hive, batch_size=7, shuffle=True, seed=1)
    assert rows_of(shuffled) == EXPECTED
    german = tc.Reader(hive / "country=d*" / "**" / "*.parquet", batch_size=7)  # a glob has the columns of its part
    assert rows_of(german) == {k: v for k, v in EXPECTED.items() if v[0] == key("country", b"de")}
    ignored = tc.Reader(hive, batch_size=7, ignore=("country", "day"))
    assert ignored.features.fields == ("shop",)
    with pytest.raises(DataError, match="it lacks 'country', 'day'"):
        tc.Reader(next((hive / "country=de").glob("*/*.parquet")), batch_size=7, features=reader.features)
    both = pa.table({"label": [1], "shop": ["x"], "country": ["de"]})
    pq.write_table(both, hive / "country=de" / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet: column 'country' is in the file and in its path; rename one"):
        tc.Reader(hive, batch_size=7)


def test_hive_partitions_on_a_remote_file_system(hive: Path) -> None:
    memory = fsspec.filesystem("memory")
    for file in hive.rglob("*.parquet"):
        memory.pipe(f"/hive/{file.relative_to(hive)}", file.read_bytes())
    memory.pipe("/hive/notes/a.parquet", b"not a partition")
    assert rows_of(tc.Reader("memory://hive", batch_size=7)) == EXPECTED


def test_positions_depend_on_the_partitions(hive: Path) -> None:
    batch = next(iter(tc.Reader(hive, batch_size=7)))
    (hive / "country=de").rename(hive / "country=xx")
    with pytest.raises(DataError, match="belongs to other data or settings"):
        tc.Reader(hive, batch_size=7).seek(batch.position)


def test_dates_of_partitions_need_a_bucket(tmp_path: Path) -> None:
    for day in ("2026-01-05", "2026-01-06"):
        (tmp_path / f"date={day}").mkdir()
        pq.write_table(pa.table({"label": [0, 1], "shop": ["a", "b"]}), tmp_path / f"date={day}" / "x.parquet")
    with pytest.raises(DataError, match=r"column 'date' has times such as '2026-01-05', .*data\.time_buckets"):
        tc.Reader(tmp_path, batch_size=4)
    (batch,) = tc.Reader(tmp_path, batch_size=4, time_buckets={"date": "weekday"})
    assert batch.ids.reshape(4, 2)[:, 1].tolist() == [key("date", b"%d" % day) for day in (0, 0, 1, 1)]


@pytest.fixture
def csv_hive(tmp_path: Path, hive: Path) -> Path:
    """The rows of `hive` as CSV files in the same folders."""
    for file in hive.rglob("*.parquet"):
        target = tmp_path / "csv" / file.relative_to(hive).with_suffix(".csv")
        target.parent.mkdir(parents=True)
        rows = pq.ParquetFile(file).read().to_pylist()
        target.write_text("label,shop\n" + "".join(f"{row['label']},{row['shop']}\n" for row in rows))
    return tmp_path / "csv"


@pytest.mark.parametrize("block_bytes", [20, 1 << 20])
def test_hive_partitions_of_csv_files_are_columns(hive: Path, csv_hive: Path, block_bytes: int) -> None:
    reader = tc.Reader(csv_hive, batch_size=7, block_bytes=block_bytes)
    assert reader.features == tc.Reader(hive, batch_size=7).features
    assert rows_of(reader) == EXPECTED
    assert len(examples_of(reader)) == 40


def test_csv_files_of_partitions(csv_hive: Path) -> None:
    ignored = tc.Reader(csv_hive, batch_size=7, ignore="country")
    assert ignored.features.fields == ("shop", "day")
    features = tc.Reader(csv_hive, batch_size=40).features
    for carry in (("shop", "day"), ("day", "country")):
        reader = tc.Reader(csv_hive, batch_size=40, carry=carry, features=features)
        (batch,) = reader
        for i, name in enumerate(("shop", "country", "day")):
            if name in carry:
                values = reader.carried[name].to_pylist()
                assert [key(name, value.encode()) for value in values] == batch.ids[i::3].tolist()
    with pytest.raises(DataError, match=r"column 'day' of the folders day=\.\.\. is a dense: CSV files can only"):
        tc.Reader(csv_hive, batch_size=7, numeric="day")
    one = next((csv_hive / "country=de").glob("*/*.csv"))
    with pytest.raises(DataError, match="it lacks 'country', 'day'"):
        tc.Reader(one, batch_size=7, features=tc.Reader(csv_hive, batch_size=7).features)
    one.write_text("label,shop,day\n1,x,2\n")
    with pytest.raises(DataError, match=r"\.csv: column 'day' is in the file and in its path; rename one"):
        tc.Reader(csv_hive, batch_size=7)


def test_bags_and_buckets_beside_partitions_of_csv_files(tmp_path: Path) -> None:
    for day, lines in (("2026-01-05", "1,a|b\n0,\n1,c\n"), ("2026-01-06", "0,d|e|f\n")):
        (tmp_path / f"date={day}").mkdir()
        (tmp_path / f"date={day}" / "x.csv").write_text("label,tags\n" + lines)
    with pytest.raises(DataError, match=r"column 'date' has times such as '2026-01-05', .*data\.time_buckets"):
        tc.Reader(tmp_path, batch_size=4, separators={"tags": "|"})
    (batch,) = tc.Reader(tmp_path, batch_size=4, separators={"tags": "|"}, time_buckets={"date": "weekday"})
    expected = [([b"a", b"b"], 0), ([], 0), ([b"c"], 0), ([b"d", b"e", b"f"], 1)]
    for example, (tags, day) in enumerate(expected):
        first, second, end = batch.offsets[2 * example : 2 * example + 3]
        assert batch.ids[first:second].tolist() == [key("tags", tag) for tag in tags]
        assert batch.ids[second:end].tolist() == [key("date", b"%d" % day)]


def test_partitions_of_other_text_files_give_a_warning(tmp_path: Path) -> None:
    (tmp_path / "day=7").mkdir()
    (tmp_path / "day=7" / "a.libsvm").write_text("1 3:1 5:1\n0 4:1 6:1\n")
    with pytest.warns(UserWarning, match=r"libsvm files in folders day=\.\.\. have no column 'day'"):
        reader = tc.Reader(tmp_path, batch_size=2)
    assert len(list(reader)) == 1


def test_arrow_datasets(hive: Path) -> None:
    dataset = ds.dataset(hive, partitioning="hive", exclude_invalid_files=True)
    assert rows_of(tc.Reader(dataset, batch_size=7)) == EXPECTED
    with pytest.raises(DataError, match="the dataset does not consist of Parquet or Arrow files: write it with"):
        tc.Reader(ds.dataset(pa.table({"label": [1]})), batch_size=7)
    remote = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(fsspec.filesystem("memory")))
    ds.write_dataset(dataset.to_table().drop(["country", "day"]), "/shops", format="parquet", filesystem=remote)
    reader = tc.Reader(ds.dataset("/shops", filesystem=remote), batch_size=9)
    assert sorted(bags[0][0][0] for _, bags, _ in examples_of(reader)) == sorted(EXPECTED)


class Files(torch.utils.data.IterableDataset[tc.Batch]):
    """Batches of a reader, one shard per worker: the example of docs/data-formats.md."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[tc.Batch]:
        worker = torch.utils.data.get_worker_info()
        shard = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from tc.Reader(self.path, batch_size=16, shard=shard, block_bytes=100)


def test_iterable_dataset_of_batches(tmp_path: Path) -> None:
    text = "".join(f"{i % 2},{i},{i % 5}\n" for i in range(200))
    (tmp_path / "a.csv").write_text("label,a,b\n" + text)
    expected = sorted(examples_of(tc.Reader(tmp_path / "a.csv", batch_size=16)))
    loader = torch.utils.data.DataLoader(Files(tmp_path / "a.csv"), batch_size=None, num_workers=2)
    assert sorted(examples_of(loader)) == expected
    assert sorted(examples_of(Files(tmp_path / "a.csv"))) == expected


class Generated(torch.utils.data.IterableDataset[tc.Batch]):
    def __iter__(self) -> Iterator[tc.Batch]:
        yield from Ads(4)


def test_training_from_an_iterable_dataset(tmp_path: Path) -> None:
    """The bits are those of the same batches from a list."""
    bits = []
    for data in (Generated(), list(Ads(4))):
        world = World(None)
        config = tc.TrainConfig(epochs=2, display=False, tensorboard=False)
        assert tc.Trainer(world.model, world.optimizer, config=config).fit(data).progress.step == 8
        bits.append({name: value for name, value in world.bits().items() if name != "random"})
        world.close()
    assert bits[0] == bits[1]
