"""Runs with [rows] and [expiry]: metrics, display lines, resumed runs, errors that name config keys."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.train import bits
from rich.console import Console

import thermocline as tc
from thermocline.training.display import Display

KEYS = np.arange(60, dtype=np.uint64)


class Model(torch.nn.Module):
    def __init__(self, table: tc.Table) -> None:
        super().__init__()
        self.bag = tc.EmbeddingBag(table, 2)
        self.out = torch.nn.Linear(2 * table.dim, 1)

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.bag(batch).flatten(1))[:, 0]
        return logits


def batches(count: int) -> list[tc.Batch]:
    rng = np.random.default_rng(4)
    return [
        tc.Batch(
            (rng.integers(0, 12, 16) + 4 * step).astype(np.uint64) % 60, np.arange(17), 2,
            label=rng.integers(0, 2, 8).astype(np.float32),
        )
        for step in range(count)
    ]  # fmt: skip


def fit(folder: Path, steps: int, resume: bool, console: Console | None = None) -> tc.Table:
    torch.manual_seed(0)
    rule = tc.Expiry(every=4, unused_steps=3, decay=0.9, min_score=0.1)
    table = tc.Table(4, tc.Adagrad(lr=0.1), mem="1MB", statistics=["last_step", "show", "click"], expiry=rule)
    model = Model(table)
    config = tc.TrainConfig(steps=steps, log_every=2, checkpoint_every=6, display=False, depth=3)
    callbacks = [] if console is None else [Display(console)]
    trainer = tc.Trainer(model, torch.optim.SGD(model.out.parameters(), lr=0.1), run_dir=folder, config=config,
                         callbacks=callbacks)  # fmt: skip
    trainer.fit(batches(20), resume=resume)
    return table


def test_metrics_display_and_resume(tmp_path: Path) -> None:
    text = io.StringIO()
    whole = fit(tmp_path / "whole", 20, False, Console(file=text, width=400))
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()
    ]
    expired = [row["expired"]["table"] for row in rows if row["event"] == "train"]
    assert [figures["rows"] > 0 for figures in expired] == [False, True] * 5
    assert sum(figures["rows"] for figures in expired) == whole.expired.rows
    assert expired[-1]["kept"] == whole.expired.last_kept == sum(len(keys) for keys, _ in whole.rows())
    assert f"expired: {expired[-1]['rows']} rows deleted, {expired[-1]['kept']} kept" in text.getvalue()
    fit(tmp_path / "parts", 9, False).close()  # ends between two expiries
    resumed = fit(tmp_path / "parts", 20, True)
    assert bits(resumed.read(KEYS)) == bits(whole.read(KEYS))
    before, after = whole.read_statistics(KEYS), resumed.read_statistics(KEYS)
    assert all(bits(before[name]) == bits(after[name]) for name in before)


def test_rules_need_statistics_of_the_config(tmp_path: Path) -> None:
    text = f"""
        [data]
        format = "synth"
        [data.synth]
        keys = 100
        fields = 2
        examples = 64
        [expiry]
        every = 10
        unused_steps = 5
        [train]
        run_dir = "{tmp_path / "run"}"
    """
    with pytest.raises(tc.ConfigError, match=r"expiry.unused_steps is 5: it needs the statistic 'last_step', but rows"):
        tc.Run(tc.Config.parse(text))
