"""Parquet and safetensors files of versions, replayed by their own readers, against the native rows."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from thermocline import serving
from thermocline.serving import Publication, row_files

from .test_publication import DIM, Oracle, change, table_rows


def replay(path: Path, format: str) -> dict[int, bytes]:
    """Replay the newest base and the deltas after it from manifests and files only."""
    manifests = {f: json.loads((f / "manifest.json").read_text()) for f in sorted(path.glob("v*"))}
    first = max(i for i, m in enumerate(manifests.values()) if m["kind"] == "base")
    rows: dict[int, bytes] = {}
    for folder, manifest in list(manifests.items())[first:]:
        assert manifest["formats"] == ["parquet", "safetensors"]
        for file in manifest["files"]:
            content = (folder / file["name"]).read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (file["bytes"], file["sha256"])
            if not file["name"].endswith(format):
                continue
            keys, weights = _read(folder / file["name"])
            if "deleted" in file["name"]:
                for key in keys:
                    rows.pop(int(key), None)
            else:
                rows.update({int(key): row.tobytes() for key, row in zip(keys, weights, strict=True)})
    return rows


def _read(path: Path) -> tuple[Any, Any]:
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        keys = table["key"].to_numpy()
        return keys, np.stack(table["weights"].to_numpy()) if "weights" in table.column_names else None
    tensors = load_file(path)
    return tensors["keys"].view(np.uint64), tensors.get("weights")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_files_replayed_equal_the_native_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any) -> None:
    monkeypatch.setattr(row_files, "_FILE_ROWS", 150)  # several files
    rng = random.Random(0)
    oracle: Oracle = {}
    change(oracle, rng, 400)
    with Publication(tmp_path, precision=precision, formats=["safetensors", "parquet"]) as publication:
        publication.publish_base([table_rows(oracle)], step=0, files={"note.txt": b"x"})
    with Publication(tmp_path) as publication:  # precision and formats of the version before
        for step in range(1, 6):
            changed, deleted = change(oracle, rng, 0 if step == 2 else 100)
            publication.publish_delta([table_rows(changed, deleted)], step=step)
            if step == 3:
                publication.compact()
            snapshot = serving.open(tmp_path)
            keys = np.array(sorted(oracle), np.uint64)
            served = snapshot.lookup(keys, missing="error")
            expected = {int(key): row.tobytes() for key, row in zip(keys, served, strict=True)}
            for format in ("parquet", "safetensors"):
                assert replay(tmp_path, format) == expected
    assert len(list(tmp_path.glob("v*/table-0-rows-00001.parquet"))) >= 2
    with pytest.raises(ValueError, match="format is 'csv'"):
        Publication(tmp_path, formats=["csv"])  # type: ignore[list-item]
    assert served.shape[1] == DIM
