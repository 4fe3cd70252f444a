"""Export of rows to Parquet and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import run as run_helpers
from helpers.run import ADS, checkpoints_of, folder_of

import thermocline as tc
from thermocline.checkpoint.export import export_rows

worlds = run_helpers.worlds  # the fixture


@pytest.mark.parametrize("storage", ["memory", "memory, saved", "ssd"])
@pytest.mark.parametrize("format", ["parquet", "safetensors"])
def test_export_holds_every_trained_row_once(tmp_path: Path, worlds: Any, storage: str, format: Any) -> None:
    world = worlds(folder_of(storage, tmp_path))
    if storage == "memory, saved":
        checkpoints = checkpoints_of(world, tmp_path)
    for n in range(8):
        world.step(ADS.batch(n))
        if storage == "memory, saved" and n == 4:
            checkpoints.save(n)
    trained_keys = np.unique(np.concatenate([ADS.batch(n).select([0, 1])[0] for n in range(8)]))
    for table in world.tables[:1]:
        files = export_rows(table, tmp_path / "out", format=format, shard_rows=100)
        index = json.loads((tmp_path / "out" / "index.json").read_text())
        assert [shard["file"] for shard in index["shards"]] == [file.name for file in files]
        assert all(shard["rows"] == 100 for shard in index["shards"][:-1])
        parts = [read_export(file) for file in files]
        keys, rows = np.concatenate([k for k, _ in parts]), np.concatenate([r for _, r in parts])
        assert index["rows"] == len(keys)
        assert sorted(keys) == sorted(trained_keys)
        assert rows.tobytes() == table.read(keys).tobytes()
    with pytest.raises(FileExistsError, match="not empty"):
        export_rows(world.tables[0], tmp_path / "out")
    with pytest.raises(ValueError, match="format is 'csv'"):
        export_rows(world.tables[0], tmp_path / "other", format="csv")  # type: ignore[arg-type]


def read_export(file: Path) -> tuple[Any, Any]:
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        columns = pq.read_table(file)
        lists = [np.array(columns[name].to_pylist(), np.float32) for name in ("weights", "state")]
        return columns["key"].to_numpy(), np.concatenate(lists, 1)
    from safetensors.numpy import load_file

    tensors = load_file(file)
    return tensors["keys"].view(np.uint64), np.concatenate([tensors["weights"], tensors["state"]], 1)


def test_export_of_an_empty_table(tmp_path: Path) -> None:
    table = tc.Table(4, tc.Adagrad(), mem="1MB")
    assert export_rows(table, tmp_path / "out") == []
    assert json.loads((tmp_path / "out" / "index.json").read_text())["rows"] == 0
