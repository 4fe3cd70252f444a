"""Parquet with list columns: train in two parts, the second one resumed, and export all rows."""

from __future__ import annotations

import dataclasses
import shutil

import pyarrow.parquet as pq

import thermocline as tc

config = tc.Config.load("parquet.toml", ["train.run_dir=runs/parquet_halves", "train.tensorboard=false"])
shutil.rmtree(config.train.run_dir, ignore_errors=True)

half = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=30))
with tc.Run(half) as run:
    run.fit()

with tc.Run(config) as run:  # another process could do this, at any time
    result = run.fit(resume=True)
    assert result.test is not None
    shutil.rmtree("runs/parquet_rows", ignore_errors=True)
    shards = tc.export_rows(run.table, "runs/parquet_rows")
rows = sum(pq.read_metadata(shard).num_rows for shard in shards)
print(f"test AUC {result.test['auc']:.4f} after {result.progress.step} steps; {rows} rows in {shards[0].parent}")
