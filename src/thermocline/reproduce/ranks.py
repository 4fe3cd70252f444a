"""A config trained by several ranks of this machine, as torchrun starts them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import thermocline
from thermocline import published
from thermocline.config import Config
from thermocline.reproduce.processes import events_of


def train(config: Config, ranks: int, folder: Path, limit: float) -> list[dict[str, Any]]:
    """The events of the run's metrics.jsonl. It begins anew: what an earlier call left is removed by the caller."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ranks.toml"
    published.publish(path, config.to_toml().encode())
    job = ["-m", "thermocline", "train", str(path), "--set", f"train.run_dir={folder / 'run'}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    root = str(Path(thermocline.__file__).parents[1])
    search = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    return events_of(f"{ranks} ranks", [sys.executable, *launcher, *job], environment, folder / "run", limit)
