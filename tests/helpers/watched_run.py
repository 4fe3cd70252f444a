"""Files of a run as `tc.Trainer` writes them, made without training."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from thermocline.training.rank_figures import NAMES

CONFIG = '[model]\nname = "dcnv2"\ndim = 16\n[tiers]\nmem = "2GB"\n[train]\nbatch_size = 4096\n'
SIZES = {
    "examples": 400_000, "examples_per_s": 500_000.0, "damaged_partitions": 0, "hbm_bytes": 1.5e9, "hbm_budget": 2e9,
    "hbm_rows": 11_000_000, "dram_bytes": 8e9, "dram_budget": 8e9, "dram_rows": 60_000_000, "ssd_rows": 900_000_000,
    "disk_bytes": 120e9, "disk_free": 400e9, "disk_total": 1e12, "ahead_batches": 120, "ahead_late_rows": 3,
}  # fmt: skip


def rank(**figures: float) -> dict[str, float]:
    """Figures of one rank; those without a name here are 1000."""
    return {**dict.fromkeys(NAMES, 1000), **SIZES, **figures}


def train_row(step: int, ranks: int = 2, **fields: Any) -> dict[str, Any]:
    """Build a training event."""
    ahead = {
        "batches": 120,
        "rows": 5000,
        "late_rows": 3,
        "mb_per_s": 950.0,
        "loading": 0.4,
        "bytes": 5e8,
        "budget": 1e9,
    }
    stage = {"busy": 0.5, "wait": 0.4, "blocked": 0.1, "fill": 2.0}
    return {
        "event": "train", "step": step, "epoch": 0, "loss": 0.5 - step / 10_000, "auc": 0.7 + step / 10_000,
        "logloss": 0.5, "ne": 0.85, "calibration": 1.0, "examples": step * 4096, "examples_per_s": 1e6 + step,
        "tables": {"ads": {"hbm": 0.8, "mem": 0.15, "ssd": 0.04, "new": 0.01}}, "lookahead": ahead, "rate": 1.0,
        "stages": dict.fromkeys(("read", "pull", "train"), stage), "damage": {}, "damaged_partitions": 0,
        "ranks": [rank() for _ in range(ranks)], "time": time.time(), **fields,
    }  # fmt: skip


def status(step: int, **fields: Any) -> dict[str, Any]:
    """Build the content of status.json of a run that this process trains."""
    now = time.time()
    return {
        "state": "training", "ending": "", "error": "", "process": os.getpid(), "host": socket.gethostname(),
        "started": now - 100, "first_step": 0, "epochs": 2, "saved": {"step": 100, "seconds": 0.4, "time": now - 9},
        "valid": None, "step": step, "epoch": 0, "total_steps": 1000, "best_auc": 0.7612, "best_step": 100,
        "updated": now, **fields,
    }  # fmt: skip


def append(run: Path, *rows: Any) -> None:
    """Add events to metrics.jsonl."""
    run.mkdir(parents=True, exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def write(run: Path, steps: int = 20, **fields: Any) -> Path:
    """Write all files of a run that has logged every tenth step; `fields` are those of status.json."""
    held = {"event": "valid", "epoch": 0, "auc": 0.7612, "logloss": 0.44, "ne": 0.8, "calibration": 1.0, "examples": 9}
    append(run, *(train_row(10 * (i + 1)) for i in range(steps)), {**held, "step": 100})
    (run / "status.json").write_text(json.dumps(status(10 * steps, **fields)))
    (run / "config.toml").write_text(CONFIG)
    return run
