"""status.json, and the figures per rank of metrics.jsonl: what `thermocline watch` reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cli import SMALL, done, invoke, lines_of, write_config

from thermocline.training import status_file
from thermocline.training.rank_figures import NAMES
from thermocline.watch.run_reader import RunReader


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(status_file, "INTERVAL", 0.0)


def status() -> dict[str, Any]:
    return dict(json.loads(Path("run/status.json").read_text()))


def test_a_finished_run_with_rows_on_ssd(tmp_path: Path) -> None:
    text = SMALL.replace('mem = "4MB"', 'mem = "2MB"\nssd = "store"')
    text = text.replace("keys = 3000", "keys = 300_000\nzipf = 0.3")
    done("train", write_config(tmp_path, text), "--set", "data.synth.examples=12000", "--set", "train.valid_every=20")
    now = status()
    assert (now["state"], now["step"], now["total_steps"], now["error"]) == ("finished", 120, 120, "")
    assert now["ending"].startswith("finished after 120 steps")
    assert now["saved"]["step"] == 120
    assert now["valid"]["event"] == "test"
    rows = [row for row in lines_of(Path("run")) if row["event"] == "train"]
    for row in rows:
        (rank,) = row["ranks"]
        assert set(rank) == set(NAMES)
        assert 0 < rank["dram_bytes"] <= rank["dram_budget"]
        assert 0 < rank["disk_free"] < rank["disk_total"]
    last = rows[-1]["ranks"][0]
    assert last["examples"] == 12000
    assert last["hbm_budget"] == 0
    assert last["ssd_rows"] > 0
    moved = ("ssd_to_dram_per_s", "dram_to_ssd_per_s", "used_ssd_per_s", "used_new_per_s")
    assert [name for name in moved if not any(row["ranks"][0][name] > 0 for row in rows)] == []
    state, _ = RunReader("run").poll()
    assert state["state"] == "finished"
    assert [point["event"] for point in state["points"]].count("train") == 120


def test_a_run_that_fails_names_its_error(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    result = invoke("train", config, "--set", "train.lr=1e30", "--set", "train.dense_lr=1e30")
    assert result.exit_code == 1
    now = status()
    assert (now["state"], now["ending"]) == ("stopped", "stopped by an error")
    assert now["error"].startswith("FloatingPointError: the loss of step")
    assert now["process"] == os.getpid()


def test_waiting_for_files_is_written(tmp_path: Path) -> None:
    progress = SimpleNamespace(step=3, epoch=0, best_auc=None, best_step=0)
    trainer: Any = SimpleNamespace(progress=progress, config=SimpleNamespace(epochs=1), total_steps=None)
    file = status_file.StatusFile(tmp_path / "run/status.json")
    file.on_start(trainer)
    file.on_wait(trainer)
    assert (status()["state"], status()["waiting"]) == ("training", True)
    file.on_step(trainer, torch.zeros(()))
    assert not status()["waiting"]


def test_a_status_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    Path("run/status.json").mkdir(parents=True)
    done("train", write_config(tmp_path), "--set", "train.steps=2")
    assert len(lines_of(Path("run"))) == 4
