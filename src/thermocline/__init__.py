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
    "Callback": "training.callbacks",
    "Checkpoint": "checkpoint.manager",
    "Checkpoints": "checkpoint.manager",
    "Config": "config.schema",
    "Tiers": "config.schema",
    "Train": "config.schema",
    "Reader": "data.reader",
    "Data": "config.data",
    "FrozenAdam": "distributed.frozen_adam",
    "DenseParameters": "distributed.dense_sync",
    "DenseSync": "config.dense_sync",
    "Dist": "config.distributed",
    "Groups": "distributed.communicator",
    "join_ranks": "distributed.launch",
    "ShardedTable": "distributed.sharded_table",
    "Topology": "distributed.topology",
    "Numeric": "config.data",
    "SyntheticAds": "data.synthetic",
    "export_rows": "checkpoint.export",
    "ModelConfig": "config.model",
    "AUC": "training.metrics",
    "Calibration": "training.metrics",
    "ExactMetrics": "training.metrics",
    "LogLoss": "training.metrics",
    "NormalizedEntropy": "training.metrics",
    "StreamingAUC": "training.metrics",
    "StreamingMetrics": "training.metrics",
    "auc": "training.metrics",
    "Progress": "training.state",
    "Result": "training.state",
    "Run": "training.run",
    "Schedule": "training.lr_schedule",
    "TrainConfig": "config.train",
    "Trainer": "training.trainer",
    "prefetch": "pipeline.prefetch",
    "EmbeddingBag": "embedding.bag",
    "Table": "embedding.table",
    "Constant": "embedding.initializers",
    "Normal": "embedding.initializers",
    "Uniform": "embedding.initializers",
    "HbmStats": "tiers.hbm",
    "HbmTier": "tiers.hbm",
    "DramStats": "tiers.dram",
    "DramTier": "tiers.dram",
    "Adagrad": "embedding.optimizers",
    "Adam": "embedding.optimizers",
    "RowWiseAdagrad": "embedding.optimizers",
    "SGD": "embedding.optimizers",
    "Precision": "embedding.precision",
    "ReferenceTable": "embedding.reference",
    "SsdStats": "tiers.ssd",
    "SsdStore": "tiers.ssd",
}
_MODULES = {"hashing": "data.feature_hashing"}
__all__ = ["__version__", *_HOME, *_MODULES]

if TYPE_CHECKING:
    from thermocline.batch import Batch as Batch, WorkingSet as WorkingSet
    from thermocline.checkpoint.export import export_rows as export_rows
    from thermocline.checkpoint.manager import Checkpoint as Checkpoint, Checkpoints as Checkpoints
    from thermocline.config.data import Data as Data, Numeric as Numeric
    from thermocline.config.dense_sync import DenseSync as DenseSync
    from thermocline.config.distributed import Dist as Dist
    from thermocline.config.model import ModelConfig as ModelConfig
    from thermocline.config.schema import Config as Config, Tiers as Tiers, Train as Train
    from thermocline.config.train import TrainConfig as TrainConfig
    from thermocline.data import feature_hashing as hashing  # noqa: F401
    from thermocline.data.reader import Reader as Reader
    from thermocline.data.synthetic import SyntheticAds as SyntheticAds
    from thermocline.distributed.communicator import Groups as Groups
    from thermocline.distributed.dense_sync import DenseParameters as DenseParameters
    from thermocline.distributed.frozen_adam import FrozenAdam as FrozenAdam
    from thermocline.distributed.launch import join_ranks as join_ranks
    from thermocline.distributed.sharded_table import ShardedTable as ShardedTable
    from thermocline.distributed.topology import Topology as Topology
    from thermocline.embedding.bag import EmbeddingBag as EmbeddingBag
    from thermocline.embedding.initializers import Constant as Constant, Normal as Normal, Uniform as Uniform
    from thermocline.embedding.optimizers import (
        SGD as SGD,
        Adagrad as Adagrad,
        Adam as Adam,
        RowWiseAdagrad as RowWiseAdagrad,
    )
    from thermocline.embedding.precision import Precision as Precision
    from thermocline.embedding.reference import ReferenceTable as ReferenceTable
    from thermocline.embedding.table import Table as Table
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
    from thermocline.pipeline.prefetch import prefetch as prefetch
    from thermocline.tiers.dram import DramStats as DramStats, DramTier as DramTier
    from thermocline.tiers.hbm import HbmStats as HbmStats, HbmTier as HbmTier
    from thermocline.tiers.ssd import SsdStats as SsdStats, SsdStore as SsdStore
    from thermocline.training.callbacks import Callback as Callback
    from thermocline.training.lr_schedule import Schedule as Schedule
    from thermocline.training.metrics import (
        AUC as AUC,
        Calibration as Calibration,
        ExactMetrics as ExactMetrics,
        LogLoss as LogLoss,
        NormalizedEntropy as NormalizedEntropy,
        StreamingAUC as StreamingAUC,
        StreamingMetrics as StreamingMetrics,
        auc as auc,
    )
    from thermocline.training.run import Run as Run
    from thermocline.training.state import Progress as Progress, Result as Result
    from thermocline.training.trainer import Trainer as Trainer


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"thermocline.{_MODULES[name]}")
    if name not in _HOME:
        raise AttributeError(f"module 'thermocline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"thermocline.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
