"""Embedding tables larger than memory: rows live in HBM, DRAM and SSD, exact and crash-safe.

Names load when first used: `import thermocline` imports neither torch nor NumPy nor the C++ core.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# OpenMP's threads spin while they wait for each other, on cores that the pipeline's threads need: with two cores, a
# sixth of the machine. OpenMP reads this when torch loads it: it only counts if thermocline is imported before torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOME = {
    "BudgetError": "errors",
    "ConfigError": "errors",
    "CorruptionError": "errors",
    "DataError": "errors",
    "DiskFullError": "errors",
    "FormatError": "errors",
    "IoError": "errors",
    "LockError": "errors",
    "NotFoundError": "errors",
    "RankError": "errors",
    "ReadOnlyError": "errors",
    "StoreError": "errors",
    "ThermoclineError": "errors",
    "Batch": "batch",
    "WorkingSet": "batch",
    "Callback": "callbacks",
    "Checkpoint": "checkpoint",
    "Checkpoints": "checkpoint",
    "Config": "config",
    "Tiers": "config",
    "Train": "config",
    "Reader": "data.reader",
    "Data": "data.schema",
    "FrozenAdam": "dist.adam",
    "DenseParameters": "dist.dense",
    "DenseSync": "dist.dense_config",
    "Dist": "dist.config",
    "Groups": "dist.groups",
    "join_ranks": "dist.launch",
    "ShardedTable": "dist.sharded",
    "Topology": "dist.topology",
    "Numeric": "data.schema",
    "SyntheticAds": "data.synth",
    "export_rows": "export",
    "ModelConfig": "models.config",
    "AUC": "metrics",
    "Calibration": "metrics",
    "ExactMetrics": "metrics",
    "LogLoss": "metrics",
    "NormalizedEntropy": "metrics",
    "StreamingAUC": "metrics",
    "StreamingMetrics": "metrics",
    "auc": "metrics",
    "Progress": "progress",
    "Result": "progress",
    "Run": "run",
    "Schedule": "schedule",
    "TrainConfig": "train_config",
    "Trainer": "train",
    "prefetch": "pipeline.prefetch",
    "EmbeddingBag": "tables.bag",
    "Table": "tables.table",
    "Constant": "tables.initial",
    "Normal": "tables.initial",
    "Uniform": "tables.initial",
    "HbmStats": "tables.hbm",
    "HbmTier": "tables.hbm",
    "Lookup": "tables.mem",
    "MemStats": "tables.mem",
    "MemTier": "tables.mem",
    "Adagrad": "tables.optimizers",
    "Adam": "tables.optimizers",
    "RowWiseAdagrad": "tables.optimizers",
    "SGD": "tables.optimizers",
    "Precision": "tables.precision",
    "ReferenceTable": "tables.reference",
    "SsdStats": "tables.ssd",
    "SsdStore": "tables.ssd",
}
_MODULES = ("hashing",)
__all__ = ["__version__", *_HOME, *_MODULES]

if TYPE_CHECKING:
    from thermocline import hashing as hashing
    from thermocline.batch import Batch as Batch, WorkingSet as WorkingSet
    from thermocline.callbacks import Callback as Callback
    from thermocline.checkpoint import Checkpoint as Checkpoint, Checkpoints as Checkpoints
    from thermocline.config import Config as Config, Tiers as Tiers, Train as Train
    from thermocline.data.reader import Reader as Reader
    from thermocline.data.schema import Data as Data, Numeric as Numeric
    from thermocline.data.synth import SyntheticAds as SyntheticAds
    from thermocline.dist.adam import FrozenAdam as FrozenAdam
    from thermocline.dist.config import Dist as Dist
    from thermocline.dist.dense import DenseParameters as DenseParameters
    from thermocline.dist.dense_config import DenseSync as DenseSync
    from thermocline.dist.groups import Groups as Groups
    from thermocline.dist.launch import join_ranks as join_ranks
    from thermocline.dist.sharded import ShardedTable as ShardedTable
    from thermocline.dist.topology import Topology as Topology
    from thermocline.errors import (
        BudgetError as BudgetError,
        ConfigError as ConfigError,
        CorruptionError as CorruptionError,
        DataError as DataError,
        DiskFullError as DiskFullError,
        FormatError as FormatError,
        IoError as IoError,
        LockError as LockError,
        NotFoundError as NotFoundError,
        RankError as RankError,
        ReadOnlyError as ReadOnlyError,
        StoreError as StoreError,
        ThermoclineError as ThermoclineError,
    )
    from thermocline.export import export_rows as export_rows
    from thermocline.metrics import (
        AUC as AUC,
        Calibration as Calibration,
        ExactMetrics as ExactMetrics,
        LogLoss as LogLoss,
        NormalizedEntropy as NormalizedEntropy,
        StreamingAUC as StreamingAUC,
        StreamingMetrics as StreamingMetrics,
        auc as auc,
    )
    from thermocline.models.config import ModelConfig as ModelConfig
    from thermocline.pipeline.prefetch import prefetch as prefetch
    from thermocline.progress import Progress as Progress, Result as Result
    from thermocline.run import Run as Run
    from thermocline.schedule import Schedule as Schedule
    from thermocline.tables.bag import EmbeddingBag as EmbeddingBag
    from thermocline.tables.hbm import HbmStats as HbmStats, HbmTier as HbmTier
    from thermocline.tables.initial import Constant as Constant, Normal as Normal, Uniform as Uniform
    from thermocline.tables.mem import Lookup as Lookup, MemStats as MemStats, MemTier as MemTier
    from thermocline.tables.optimizers import (
        SGD as SGD,
        Adagrad as Adagrad,
        Adam as Adam,
        RowWiseAdagrad as RowWiseAdagrad,
    )
    from thermocline.tables.precision import Precision as Precision
    from thermocline.tables.reference import ReferenceTable as ReferenceTable
    from thermocline.tables.ssd import SsdStats as SsdStats, SsdStore as SsdStore
    from thermocline.tables.table import Table as Table
    from thermocline.train import Trainer as Trainer
    from thermocline.train_config import TrainConfig as TrainConfig


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"thermocline.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'thermocline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"thermocline.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
