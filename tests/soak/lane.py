"""A lane of the soak: one training run that is killed and resumed, and the config of each of its attempts.

What determines the result (model, data, optimizer, expiry, admission, merges of dense models) is a function of the
lane's seed. What must not change it (budgets, threads, depth, look-ahead, overlap, saves, publishing) is drawn again
for every attempt.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import thermocline as tc

ADMISSION_BYTES = 1 << 20
RUN = """
[data]
format = "synth"
[data.synth]
keys = 120_000
fields = 6
zipf = 1.05
examples = 400_000
valid_examples = 0
test_examples = 0
seed = {seed}
[model]
name = "{model}"
dim = 8
hidden = [16]
dropout = 0.1
embedding_l2 = 1e-6
initial = 0.01
[rows]
statistics = ["frequency", "last_step", "show", "click"]
[expiry]
every = {expiry_every}
unused_steps = 700
decay = 0.97
min_score = 0.02
max_rows = 24_000
[tiers]
device = "cpu"
[train]
epochs = 1_000_000
batch_size = {batch_size}
optimizer = "{optimizer}"
lr = 0.02
dense_optimizer = "adam"
dense_lr = 1e-3
torch_threads = 1
tensorboard = false
display = false
log_every = 1000
seed = {seed}
[train.schedule]
kind = "cosine"
warmup_steps = 50
decay_steps = 100_000
floor = 0.2
[admission]
count = 2
sketch = {sketch}
memory = {admission_bytes}
otherwise = "shared"
[dist.dense_sync]
every = {merge_every}
"""


@dataclasses.dataclass(frozen=True)
class Lane:
    """A run of `world` ranks. A lasting lane continues until the soak ends, any other until it has been compared."""

    number: int
    world: int
    seed: int
    lasting: bool

    @property
    def name(self) -> str:
        """Name of its folders."""
        return f"lane{self.number}"

    def _text(self) -> str:
        rng = random.Random(f"lane {self.seed}")
        return RUN.format(
            seed=self.seed,
            model=rng.choice(["dnn", "deepfm", "dcnv2"]),
            optimizer=rng.choice(["adagrad", "adam", "rowwise_adagrad", "sgd"]),
            batch_size=rng.choice([128, 192, 256]),
            expiry_every=rng.choice([60, 100, 170]),
            sketch=rng.choice(["true", "false"]),
            admission_bytes=ADMISSION_BYTES,
            merge_every=1 if self.world == 1 else rng.choice([1, 8]),
        )

    def reference_config(self, folder: Path) -> tc.Config:
        """Return the config of the uninterrupted run: all rows in DRAM, no store, no save, no publishing."""
        return self._config(folder, {"train.steps": 10**9, "train.checkpoint_minutes": "none", "tiers.mem": "256MB",
                                     "dist.timeout": 10**6, "dist.busy_timeout": 10**6})  # fmt: skip

    def attempt_config(self, folder: Path, rng: random.Random, steps: int) -> tc.Config:
        """Return the config of one attempt, with random budgets, that ends after step `steps`."""
        settings: dict[str, Any] = {
            "train.steps": steps,
            "train.checkpoint_every": rng.choice([15, 40, 100, 250]),
            "train.keep": rng.randint(1, 3),
            "train.depth": rng.randint(1, 6),
            "train.pull_window": rng.choice([1, 1, 2, 3]),
            "tiers.ssd": folder / self.name / "store",
            "tiers.mem": f"{rng.choice([2, 3, 5, 8, 16])}MB",
            "tiers.ssd_mem": f"{rng.choice([16, 24, 32])}MB",
            "tiers.threads": rng.randint(1, 3),
            "tiers.policy": rng.choice(["lru_lfu", "lru", "lfu"]),
            "tiers.lookahead": rng.choice(["auto", 0, 2, 8, 32]),
            "dist.timeout": 60,
            "dist.hops": rng.choice(["two", "flat"]),
            "dist.overlap": rng.choice(["true", "false"]),
            "publish.folder": folder / self.name / "served",
            "publish.every_steps": rng.choice([30, 90, 200]),
            "publish.base_every": rng.choice([3, 6, 12]),
        }
        return self._config(folder, settings)

    def _config(self, folder: Path, settings: dict[str, Any]) -> tc.Config:
        settings = settings | {"train.run_dir": folder / self.name / "run"}
        return tc.Config.parse(self._text(), [f"{name}={value}" for name, value in settings.items()])


def budget_bytes(config: tc.Config) -> int:
    """Return the memory that the config gives to rows, store and counters of one rank."""
    from thermocline.utils.text_format import parse_size

    store = 0 if config.tiers.ssd_mem is None else parse_size(config.tiers.ssd_mem, "ssd_mem")
    return parse_size(config.tiers.mem, "mem") + store + ADMISSION_BYTES
