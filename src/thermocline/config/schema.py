"""`Config`: all settings of a run in ten sections. One schema is the API, the TOML file and the `--set` flags.

[data] is `tc.Data`, [model] is `tc.ModelConfig`, [precision] is `tc.Precision`, [rows] is `tc.Rows`, [admission] is
`tc.Admission`, [expiry] is `tc.Expiry`, [tiers] is `tc.Tiers`, [train] is `tc.Train` with all fields of
`tc.TrainConfig`, [dist] is `tc.Dist`, and [publish] is `tc.Publish`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from annotated_types import Ge, Le
from pydantic import model_validator

from thermocline.config import loader
from thermocline.config.data import Data
from thermocline.config.distributed import Dist
from thermocline.config.fields import Count, Lookahead, Maybe, NonNegative, Rule, Size
from thermocline.config.messages import reject
from thermocline.config.model import ModelConfig
from thermocline.config.publish import Publish
from thermocline.config.section import section
from thermocline.config.train import TrainConfig
from thermocline.embedding.admission import Admission
from thermocline.embedding.expiry import Expiry
from thermocline.embedding.optimizers import MOST_STEPS, Lazy
from thermocline.embedding.precision import Precision
from thermocline.embedding.row_statistics import RowStatistics, Statistic
from thermocline.embedding.table_spec import OnDamage, Policy


def _each_once(names: tuple[str, ...]) -> bool:
    return len(set(names)) == len(names)


OptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"]


@section("tiers")
class Tiers:
    """Storage of the rows: the budgets of `tc.Table`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of training. auto: the GPU, if there is one."""
    hbm: Maybe[Size] = None
    """GPU memory for hot rows, their index and metadata. By default half of the free memory."""
    mem: Size = "1GB"
    """DRAM for rows, their index and metadata."""
    mem_overcommit: bool = False
    """Accept mem + ssd_mem beyond the memory of the machine, over all ranks that torchrun starts on it."""
    ssd: Maybe[str] = None
    """Folder of the SSD store, for rows that do not fit in DRAM. By default rows are in memory only."""
    lookahead: Lookahead = "auto"
    """How far rows are loaded from SSD ahead of training: "auto", a number of batches loaded together (0: none), or a
    size: bytes of `mem` for the batches in flight. Has no effect without `ssd`, and over several ranks none yet."""
    ssd_mem: Maybe[Size] = None
    """DRAM for the index and the buffers of the SSD store, beside mem. By default an eighth of the machine's memory."""
    expected_keys: Maybe[Count] = None
    """Keys that the table will have, over all ranks. The run is refused at start if ssd_mem cannot hold their index."""
    on_damage: OnDamage = "stop"
    """When a merge finds a damaged page of the store: stop saves and ends the run; continue trains on."""
    policy: Policy = "lru_lfu"
    """Eviction policy of the DRAM tier."""
    threads: Maybe[Count] = None
    """Threads of the DRAM tier. By default one per core."""


@section("rows")
class Rows:
    """Statistics that are kept with each row."""

    statistics: Annotated[tuple[Statistic, ...], Rule("a list of statistics, each once", _each_once)] = ()
    """Any of frequency, last_step, last_time, show and click. 4 bytes per row each, last_time 8; show or click 4 more.
    last_time needs data.time."""

    @property
    def bytes(self) -> int:
        """Bytes of the statistics per row."""
        return RowStatistics.of(self.statistics).bytes


@section("train")
class Train(TrainConfig):
    """`tc.TrainConfig` with batch size, optimizers, seed and folder of the run."""

    batch_size: Count = 4096
    """Examples per step, on each rank."""
    optimizer: OptimizerName = "adam"
    """Optimizer of rows."""
    lr: NonNegative = 1e-3
    """Learning rate of rows."""
    lazy: Lazy = "touched"
    """Steps without a gradient of a row. touched: they do not change it. catch_up: as if every step updated every row,
    with L2 and moments; rows replay missed steps when they are read. Needs precision fp32."""
    catch_up_steps: Annotated[int, Ge(1), Le(MOST_STEPS)] = 1000
    """Most missed steps that a row replays, the last ones. Has no effect without lazy = "catch_up"."""
    dense_optimizer: Maybe[OptimizerName] = None
    """Optimizer of dense parameters, from torch (Adagrad for rowwise_adagrad, Adam for partial_rowwise_adam). By
    default as for rows."""
    dense_lr: Maybe[NonNegative] = None
    """Learning rate of dense parameters. By default as for rows."""
    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 0
    """Seed of initial rows and weights, shuffling and dropout."""
    run_dir: Annotated[str, Rule("the name of a folder", bool)] = "run"
    """Folder of the run: config.toml, metrics.jsonl, tensorboard, checkpoints."""


@section("")
class Config:
    """All settings of a run."""

    data: Data = Data()
    """Input files, their columns, and how columns become features."""
    model: ModelConfig = ModelConfig()
    """Architecture and its sizes."""
    precision: Precision = Precision()
    """Stored precision of embedding weights."""
    rows: Rows = Rows()
    """Statistics of rows."""
    admission: Maybe[Admission] = None
    """Which keys get a row. By default all that are trained."""
    expiry: Maybe[Expiry] = None
    """Rules that delete rows, and the steps at which they run. By default no row is deleted."""
    tiers: Tiers = Tiers()
    """Memory budgets and the SSD store."""
    train: Train = Train()
    """Training loop, optimizers and the folder of the run."""
    dist: Dist = Dist()
    """Several ranks."""
    publish: Publish = Publish()
    """Versions for serving."""

    @model_validator(mode="after")
    def _check_follow(self) -> Self:
        # Between two files there is no end of an epoch, no partial step and no partial window.
        for name in ("epochs", "accumulate", "pull_window") if self.data.follow else ():
            if (value := getattr(self.train, name)) != 1:
                reject(f"train.{name}", value, "1 with data.follow = true")
        return self

    @model_validator(mode="after")
    def _check_event_time(self) -> Self:
        if self.train.progressive_time is not None and self.data.time is None:
            reject("train.progressive_time", self.train.progressive_time, "left out unless data.time is set")
        if self.train.max_time_jump is not None and self.data.time is None:
            reject("train.max_time_jump", self.train.max_time_jump, "left out unless data.time is set")
        return self

    @classmethod
    def load(cls, path: str | Path, sets: Sequence[str] = ()) -> Self:
        """Read a TOML file, with overrides such as "train.lr=0.01". Raises `ConfigError`, one line."""
        return loader.load(cls, path, sets)

    @classmethod
    def parse(cls, text: str, sets: Sequence[str] = (), *, name: str = "config") -> Self:
        """Read TOML text; errors name the file `name`."""
        return loader.parse(cls, text, sets, name=name)

    def resolve(self) -> Self:
        """Return a copy with every default filled in that depends on other settings."""
        train = self.train
        whole: dict[OptimizerName, OptimizerName] = {"rowwise_adagrad": "adagrad", "partial_rowwise_adam": "adam"}
        dense = train.dense_optimizer or whole.get(train.optimizer, train.optimizer)
        rate = train.lr if train.dense_lr is None else train.dense_lr
        train = dataclasses.replace(train, dense_optimizer=dense, dense_lr=rate)
        return dataclasses.replace(self, model=self.model.resolve(), train=train)

    def with_absolute_ssd(self) -> Self:
        """Return a copy in which the path of a store outside run_dir is absolute."""
        ssd = self.tiers.ssd
        if ssd is None or Path(ssd).absolute().is_relative_to(Path(self.train.run_dir).absolute()):
            return self
        return dataclasses.replace(self, tiers=dataclasses.replace(self.tiers, ssd=str(Path(ssd).absolute())))

    def relocated(self, run_dir: str | Path) -> Self:
        """Return a copy for a run whose folder is now `run_dir`; a store inside the folder has moved with it."""
        before, ssd = Path(self.train.run_dir).absolute(), self.tiers.ssd
        tiers = self.tiers
        if ssd is not None and Path(ssd).absolute().is_relative_to(before):
            tiers = dataclasses.replace(tiers, ssd=str(Path(run_dir) / Path(ssd).absolute().relative_to(before)))
        return dataclasses.replace(self, tiers=tiers, train=dataclasses.replace(self.train, run_dir=str(run_dir)))

    def to_toml(self) -> str:
        """Write every key as TOML, which `load` reads to an equal config."""
        return loader.to_toml(self)
