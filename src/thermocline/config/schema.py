"""`tc.Config`: everything a run is, in six sections. The same dataclasses are API, file and flags.

[data] is `tc.Data`, [model] is `tc.ModelConfig`, [precision] of its rows is `tc.Precision`, [tiers] and [train] are
below; [train] has all of `tc.TrainConfig`; [dist] is `tc.Dist`, for several ranks.
Nothing here loads torch, so that a mistake in a file is told at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from thermocline.config import loader
from thermocline.config.data import Data
from thermocline.config.distributed import Dist
from thermocline.config.loader import Flag
from thermocline.config.model import ModelConfig
from thermocline.config.train import TrainConfig
from thermocline.embedding.precision import Precision
from thermocline.embedding.table_spec import Policy
from thermocline.errors import ConfigError, require
from thermocline.utils.text_format import Size, parse_size

OptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Where the rows live, and how many bytes they may take there: the budgets of `tc.Table`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where training runs; auto: on the GPU, if there is one."""
    hbm: Size | None = None
    """GPU memory for hot rows, their index and metadata; none: half of what is free."""
    mem: Size = "1GB"
    """DRAM for rows, their index and metadata."""
    ssd: str | None = None
    """Folder of the store for rows that do not fit; none: memory only."""
    ssd_mem: Size = "256MB"
    """DRAM of the store itself: its index and buffers."""
    policy: Policy = "lru_lfu"
    """Which rows leave memory first."""
    threads: int | None = None
    """Of the memory tier; none: all cores."""

    def __post_init__(self) -> None:
        for name in ("hbm", "mem", "ssd_mem"):
            if getattr(self, name) is not None:
                parse_size(getattr(self, name), f"tiers.{name}")
        require(self.threads is None or self.threads >= 1, "tiers.threads", self.threads, "at least 1, or none")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Train(TrainConfig):
    """`tc.TrainConfig`, and what the loop is made of."""

    batch_size: int = 4096
    """Examples per step; of each rank, if there are several."""
    optimizer: OptimizerName = "adam"
    """Of rows."""
    lr: float = 1e-3
    """Of rows."""
    dense_optimizer: OptimizerName | None = None
    """Of dense parameters, torch's own (rowwise_adagrad: its Adagrad); none: the same kind as of rows."""
    dense_lr: float | None = None
    """Of dense parameters; none: as of rows."""
    seed: int = 0
    """Of initial rows and weights, shuffling and dropout."""
    run_dir: str = "run"
    """Folder of the run: config.toml, metrics.jsonl, tensorboard, checkpoints."""

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        require(self.batch_size >= 1, "train.batch_size", self.batch_size, "at least 1")
        require(0 <= self.seed < 2**63, "train.seed", self.seed, "0 to 2**63 - 1")
        for name in ("lr", "dense_lr"):
            value = getattr(self, name)
            fine = value is None or 0 <= value < float("inf")
            require(fine, f"train.{name}", value, "a finite number, not negative")
        require(bool(self.run_dir), "train.run_dir", self.run_dir, "a folder's name")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run."""

    data: Data = dataclasses.field(default_factory=Data)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    precision: Precision = dataclasses.field(default_factory=Precision)
    tiers: Tiers = dataclasses.field(default_factory=Tiers)
    train: Train = dataclasses.field(default_factory=Train)
    dist: Dist = dataclasses.field(default_factory=Dist)

    @classmethod
    def load(cls, path: str | Path, sets: Sequence[str] = ()) -> Self:
        """From a TOML file and overrides such as "train.lr=0.01". Raises `ConfigError`, one line."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as a config: {_cause(error)}") from None
        return cls.parse(text, sets, name=str(path))

    @classmethod
    def parse(cls, text: str, sets: Sequence[str] = (), *, name: str = "config") -> Self:
        """The same from TOML as text; `name` stands for the file in errors."""
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{name} is not TOML: {error}") from None
        try:
            for override in sets:
                _override(values, override)
            return loader.build(cls, values)
        except ConfigError as error:
            raise ConfigError(cls._blamed(str(error), text, sets, name)) from None

    @classmethod
    def _blamed(cls, message: str, text: str, sets: Sequence[str], name: str) -> str:
        """With whose mistake it is: an override's where the message names its key, or where the file alone is right."""
        if message.startswith("--set"):
            return message
        if any(message.startswith(f"{override.partition('=')[0].strip()} is ") for override in sets):
            return f"--set {message}"
        if sets:
            with contextlib.suppress(ConfigError):
                loader.build(cls, tomllib.loads(text))
                return f"{name} with {' '.join(f'--set {override}' for override in sets)}: {message}"
        return f"{name}: {message}"

    def resolve(self) -> Self:
        """The same with everything filled in that depends on other settings."""
        train = self.train
        dense = train.dense_optimizer or ("adagrad" if train.optimizer == "rowwise_adagrad" else train.optimizer)
        rate = train.lr if train.dense_lr is None else train.dense_lr
        train = dataclasses.replace(train, dense_optimizer=dense, dense_lr=rate)
        return dataclasses.replace(self, model=self.model.resolve(), train=train)

    def located(self) -> Self:
        """The same with a store outside the run's folder named so that it is found from anywhere."""
        ssd = self.tiers.ssd
        if ssd is None or Path(ssd).absolute().is_relative_to(Path(self.train.run_dir).absolute()):
            return self
        return dataclasses.replace(self, tiers=dataclasses.replace(self.tiers, ssd=str(Path(ssd).absolute())))

    def moved(self, run_dir: str | Path) -> Self:
        """The config of a run whose folder is now `run_dir`: a store inside the folder went with it."""
        was, ssd = Path(self.train.run_dir).absolute(), self.tiers.ssd
        tiers = self.tiers
        if ssd is not None and Path(ssd).absolute().is_relative_to(was):
            tiers = dataclasses.replace(tiers, ssd=str(Path(run_dir) / Path(ssd).absolute().relative_to(was)))
        return dataclasses.replace(self, tiers=tiers, train=dataclasses.replace(self.train, run_dir=str(run_dir)))

    def to_toml(self) -> str:
        """As a file that `load` reads to the same config."""
        return loader.to_toml(self)


def _override(values: dict[str, Any], override: str) -> None:
    """Puts "a.b=c" into the parsed file."""
    name, equals, text = override.partition("=")
    path = [part.strip() for part in name.split(".")]
    if not equals or not all(path) or len(path) < 2:
        raise ConfigError(f'--set is "{override}": write section.key=value, such as train.lr=0.01')
    for depth, part in enumerate(path[:-1], start=1):
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {'.'.join(path[:depth])} is a value, not a section")
        values = inner
    values[path[-1]] = Flag(text.strip())


def _cause(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


# ---- what a resumed run may change

MAY_CHANGE = frozenset(
    {
        *("data.valid", "data.test", "data.on_error", "data.threads"),
        *("tiers.hbm", "tiers.mem", "tiers.ssd", "tiers.ssd_mem", "tiers.policy", "tiers.threads"),
        *("train.epochs", "train.steps", "train.clip_norm", "train.valid_every", "train.patience"),
        "train.plateau_factor",
        *("train.checkpoint_every", "train.checkpoint_minutes", "train.keep", "train.depth", "train.pull_window"),
        *("train.log_every", "train.tensorboard", "train.display", "train.run_dir"),
        *("dist.hops", "dist.topology", "dist.timeout", "dist.bind"),
        *(f"train.schedule.{name}" for name in ("kind", "warmup_steps", "decay_steps", "factor", "floor")),
    }
)
"""All else is part of what was trained: rows, weights and the reader's position would no longer mean the same."""


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, with both, of two resolved configs."""
    before, after = dict(loader.flatten(old)), dict(loader.flatten(new))
    names = [*before, *(name for name in after if name not in before)]
    return {n: (before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n)}


def check_resume(old: Config, new: Config, run_dir: str) -> list[str]:
    """Lines that say what a resumed run changes; raises `ConfigError` if it changes what it may not."""
    changed = differences(old, new)

    def words(name: str) -> str:
        was, now = changed[name]
        return f"{name} from {loader.toml_value(was)} to {loader.toml_value(now)}"

    if wrong := [name for name in changed if name not in MAY_CHANGE]:
        raise ConfigError(
            f"{run_dir} was trained with another config: it cannot go on with {'; '.join(map(words, wrong))}. "
            f"May change: {', '.join(_grouped(MAY_CHANGE))}"
        )
    return [words(name) for name in changed]


def _grouped(names: frozenset[str]) -> list[str]:
    """Whole sections by their name: shorter to read."""
    schedule = {name for name in names if name.startswith("train.schedule.")}
    return sorted({*(names - schedule), "train.schedule"} if schedule else names)
