"""Runs with [rows] and [expiry]: metrics, display lines, resumed runs, errors that name config keys."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from helpers.train import bits
from rich.console import Console

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.training.display import Display
from thermocline.training.state import Progress

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
    rule = tc.Expiry(every=4, spread=1, unused_steps=3, decay=0.9, min_score=0.1)
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
    assert "kept" not in expired[0]
    assert "expired: 0 rows deleted  " in text.getvalue()  # no expiry has ended: what it keeps is not known
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


@pytest.mark.parametrize("jump", [None, "100s"])
def test_one_wrong_event_time_expires_no_row(jump: str | None) -> None:
    """The batch of step 3 has an example of the year 36812: the watermarks of run and table move by the limit."""
    torch.manual_seed(0)
    rule = tc.Expiry(every=1, unused_seconds=1000)
    table = tc.Table(4, tc.Adagrad(lr=0.1), mem="1MB", statistics=["last_time"], expiry=rule)
    model = Model(table)
    data = batches(6)
    for step, batch in enumerate(data):
        batch.time = np.full(8, 1_700_000_000 + 60 * step)
    data[2].time[3] = 2**40
    config = tc.TrainConfig(steps=6, display=False, max_time_jump=jump)
    trainer = tc.Trainer(model, torch.optim.SGD(model.out.parameters(), lr=0.1), config=config)
    trainer.fit(data)
    if jump is None:
        assert table.expired.rows > 10
        assert trainer.progress.event_time == 2**40
    else:
        assert table.expired.rows == 0
        assert trainer.progress.event_time == table.backend.statistics.newest == 1_700_000_000 + 300


def test_the_first_batch_is_limited_too() -> None:
    progress = Progress()
    progress.advance_time(np.array([2**40, 5000, 5100]), 60)
    assert progress.event_time == 5060
    progress.advance_time(np.array([100]), 60)
    assert progress.event_time == 5060
    progress.advance_time(np.array([2**40, 5090]), None)
    assert progress.event_time == 2**40


def watermarks(groups: Groups) -> list[int | None]:
    """The first step has examples on ranks 0 and 1; the only one of rank 1 has a wrong time. Then none, then rank 2."""
    table = tc.ShardedTable(4, tc.Adagrad(lr=0.1), mem="1MB", statistics=["last_time"], groups=groups)
    table.max_time_jump = 60
    rank, newest = groups.topology.rank, []
    for times in (([5000, 5100], [2**40], []), ([], [], []), ([], [], [5070])):
        time = np.array(times[rank], np.int64)
        table.set_step_time([tc.Batch(KEYS[: len(time)], np.arange(len(time) + 1), 1, time=time)])
        newest.append(table.backend.statistics.newest)
    return newest


def test_the_first_batch_of_all_ranks_is_limited_by_its_oldest_time() -> None:
    assert run_ranks(((0, 1, 2),), watermarks) == [[5060, 5060, 5070]] * 3


def test_the_limit_needs_event_times() -> None:
    text = """
        [data]
        format = "synth"
        [train]
        max_time_jump = "1d"
    """
    with pytest.raises(
        tc.ConfigError, match=r'train.max_time_jump is "1d": it must be left out unless data.time is set'
    ):
        tc.Config.parse(text)
