"""Readers in training: generated data is written and read back; a run killed mid-epoch resumes bit for bit."""

from __future__ import annotations

import contextlib
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.reader import criteo_row
from helpers.train import bits, weights_of

import thermocline as tc
from thermocline.config.data import Numeric


@pytest.mark.parametrize("format", ["parquet", "libsvm", "libffm"])
@pytest.mark.parametrize("nonzeros", [None, (4, 9)])
def test_written_synthetic_ads_are_read_back(tmp_path: Path, format: Any, nonzeros: Any) -> None:
    one = format == "libsvm" and nonzeros is not None  # fields="position" needs the same number of ids in every line
    dense = 3 if format == "parquet" else 0
    ads = tc.SyntheticAds(keys=900, fields=4, nonzeros=nonzeros, dense=dense, examples=700, batch_size=64, seed=2)
    ads.write(tmp_path / "ads", format, examples_per_file=250)
    numeric = {"numeric": ("dense_*",), "numeric_features": Numeric(standardize=False)} if dense else {}
    options: dict[str, Any] = {"fields": "one" if one else "position", **numeric}
    reader = tc.Reader(tmp_path / "ads", raw_keys=True, batch_size=64, block_bytes=3000, **options)
    assert (reader.fields, reader.dense) == (1 if one else 4, dense)
    for actual, expected in zip(reader, ads, strict=True):
        assert actual.ids.tobytes() == expected.ids.tobytes()
        assert actual.offsets.tobytes() == expected.offsets[:: 4 if one else 1].tobytes()
        assert actual.weights is None
        assert bits(actual.label) == bits(expected.label)
        assert (actual.dense is None) == (dense == 0)
        if dense:
            assert bits(actual.dense) == bits(expected.dense)


class Net(torch.nn.Module):
    def __init__(self, table: tc.Table, fields: int, dense: int) -> None:
        super().__init__()
        self.bag = tc.EmbeddingBag(table, fields=fields)
        self.out = torch.nn.Linear(fields * table.dim + dense, 1)

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        return self.out(torch.cat([self.bag(batch).flatten(1), batch.dense], 1)).squeeze(1)  # type: ignore[no-any-return]


class Killed(Exception):
    pass


class KillAt(tc.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: tc.Trainer, loss: torch.Tensor) -> None:
        if trainer.progress.step == self.step:
            raise Killed


@pytest.mark.parametrize(("compression", "kills"), [("", [7, 30]), (".gz", [14])])  # steps, of 18 per epoch
def test_killed_run_resumes_bit_for_bit(tmp_path: Path, compression: str, kills: list[int]) -> None:
    rng = np.random.default_rng(0)
    text = "".join("\t".join(criteo_row(rng)) + "\n" for _ in range(900))
    path = tmp_path / f"train.txt{compression}"
    path.write_bytes(gzip.compress(text.encode()) if compression else text.encode())

    def fit(name: str, kill: int | None = None, threads: int = 2) -> tuple[bytes, bytes]:
        reader = tc.Reader(
            path,
            format="criteo",
            numeric_features=Numeric(log=True),
            batch_size=50,
            block_bytes=4000,
            shuffle_buffer=120,
            shuffle=True,
            seed=7,
            threads=threads,
        )
        torch.manual_seed(0)
        (tmp_path / name).mkdir(exist_ok=True)
        table = tc.Table(4, tc.Adagrad(lr=0.1), mem="8MB", ssd=tmp_path / name / "rows", ssd_mem="16MB")
        with contextlib.closing(table):
            model = Net(table, reader.fields, reader.dense)
            config = tc.TrainConfig(epochs=2, checkpoint_every=4, display=False, tensorboard=False, depth=3)
            callbacks = [] if kill is None else [KillAt(kill)]
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            trainer = tc.Trainer(model, optimizer, run_dir=tmp_path / name, config=config, callbacks=callbacks)
            if kill is not None:
                with pytest.raises(Killed):
                    trainer.fit(reader, resume=True)
                return b"", b""
            trainer.fit(reader, resume=True)
            assert trainer.progress.step == 36
            keys = np.unique(np.concatenate([batch.ids for batch in reader]))
            return weights_of(model), bits(table.read(keys))

    whole = fit("whole")
    for kill in kills:
        fit("killed", kill)
    assert fit("killed", threads=1) == whole
