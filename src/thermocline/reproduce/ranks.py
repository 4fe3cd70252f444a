"""A config trained by several ranks of this machine, as torchrun starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import thermocline
from thermocline import published
from thermocline.config import Config
from thermocline.errors import ThermoclineError


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
    try:
        done = subprocess.run(
            [sys.executable, *launcher, *job], env=environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise ThermoclineError(
            f"{ranks} ranks did not end within {limit:.0f} s: a smaller --effort trains less"
        ) from None
    if done.returncode:
        raise ThermoclineError(f"{ranks} ranks failed: {done.stderr.strip()[-1000:]}")
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
