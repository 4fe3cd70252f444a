"""A config trained by several ranks of this machine, as torchrun starts them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.processes import events_of
from thermocline.config.data import Data, Synth
from thermocline.config.model import ModelConfig
from thermocline.config.schema import Config, Tiers, Train
from thermocline.distributed.launch import child_environment
from thermocline.utils import atomic_file


def one_core_each(synth: Synth, *, dim: int, hidden: tuple[int, ...], batch: int, log_every: int) -> Config:
    """A DNN on generated data, its seed the data's; every rank has one thread, and all rows in memory."""
    return Config(
        data=Data(format="synth", synth=synth, threads=1),
        model=ModelConfig(
            name="dnn", dim=dim, hidden=hidden, dropout=0.0, embedding_l2=0.0, initial=0.01, batch_norm=False
        ),
        tiers=Tiers(device="cpu", mem=synth.keys * 200 + (64 << 20), threads=1),
        train=Train(
            batch_size=batch, optimizer="adagrad", lr=0.05, dense_optimizer="adam", dense_lr=1e-3, seed=synth.seed,
            torch_threads=1, log_every=log_every, checkpoint_minutes=None, display=False, tensorboard=False,
        ),
    )  # fmt: skip


def train(config: Config, ranks: int, folder: Path, limit: float) -> list[dict[str, Any]]:
    """The events of the run's metrics.jsonl. It begins anew, whatever an earlier call has left."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ranks.toml"
    atomic_file.atomic_write(path, config.to_toml().encode())
    job = ["-m", "thermocline", "train", str(path), "--set", f"train.run_dir={folder / 'run'}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, *job]
    return events_of(f"{ranks} ranks", command, child_environment(), folder / "run", limit)


def speed_of(events: Sequence[Mapping[str, Any]]) -> float:
    """Examples/s over all logs but the first, which has the start."""
    logs = [event for event in events if event["event"] == "train"][1:]
    return float(len(logs) / sum(1 / event["examples_per_s"] for event in logs))
