"""Embedding tables larger than memory: rows live in HBM, DRAM and SSD, exact and crash-safe.

Names load when first used: `import thermocline` imports neither torch nor NumPy nor the C++ core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BudgetError": "errors",
    "CorruptionError": "errors",
    "DiskFullError": "errors",
    "FormatError": "errors",
    "IoError": "errors",
    "LockError": "errors",
    "NotFoundError": "errors",
    "ReadOnlyError": "errors",
    "StoreError": "errors",
    "ThermoclineError": "errors",
    "Batch": "batch",
    "WorkingSet": "batch",
    "Callback": "callbacks",
    "Checkpoint": "checkpoint",
    "Checkpoints": "checkpoint",
    "SyntheticAds": "data.synth",
    "export_rows": "export",
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
    "Schedule": "schedule",
    "TrainConfig": "train",
    "Trainer": "train",
    "prefetch": "pipeline.prefetch",
    "EmbeddingBag": "tables.bag",
    "Table": "tables.table",
    "Constant": "tables.initial",
    "Normal": "tables.initial",
    "Uniform": "tables.initial",
    "Lookup": "tables.mem",
    "MemStats": "tables.mem",
    "MemTier": "tables.mem",
    "Adagrad": "tables.optimizers",
    "Adam": "tables.optimizers",
    "RowWiseAdagrad": "tables.optimizers",
    "SGD": "tables.optimizers",
    "ReferenceTable": "tables.reference",
    "SsdStats": "tables.ssd",
    "SsdStore": "tables.ssd",
}
__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from thermocline.batch import Batch as Batch
    from thermocline.batch import WorkingSet as WorkingSet
    from thermocline.callbacks import Callback as Callback
    from thermocline.checkpoint import Checkpoint as Checkpoint
    from thermocline.checkpoint import Checkpoints as Checkpoints
    from thermocline.data.synth import SyntheticAds as SyntheticAds
    from thermocline.errors import (
        BudgetError as BudgetError,
    )
    from thermocline.errors import (
        CorruptionError as CorruptionError,
    )
    from thermocline.errors import (
        DiskFullError as DiskFullError,
    )
    from thermocline.errors import (
        FormatError as FormatError,
    )
    from thermocline.errors import (
        IoError as IoError,
    )
    from thermocline.errors import (
        LockError as LockError,
    )
    from thermocline.errors import (
        NotFoundError as NotFoundError,
    )
    from thermocline.errors import (
        ReadOnlyError as ReadOnlyError,
    )
    from thermocline.errors import (
        StoreError as StoreError,
    )
    from thermocline.errors import (
        ThermoclineError as ThermoclineError,
    )
    from thermocline.export import export_rows as export_rows
    from thermocline.metrics import AUC as AUC
    from thermocline.metrics import Calibration as Calibration
    from thermocline.metrics import ExactMetrics as ExactMetrics
    from thermocline.metrics import LogLoss as LogLoss
    from thermocline.metrics import NormalizedEntropy as NormalizedEntropy
    from thermocline.metrics import StreamingAUC as StreamingAUC
    from thermocline.metrics import StreamingMetrics as StreamingMetrics
    from thermocline.metrics import auc as auc
    from thermocline.pipeline.prefetch import prefetch as prefetch
    from thermocline.progress import Progress as Progress
    from thermocline.progress import Result as Result
    from thermocline.schedule import Schedule as Schedule
    from thermocline.tables.bag import EmbeddingBag as EmbeddingBag
    from thermocline.tables.initial import Constant as Constant
    from thermocline.tables.initial import Normal as Normal
    from thermocline.tables.initial import Uniform as Uniform
    from thermocline.tables.mem import Lookup as Lookup
    from thermocline.tables.mem import MemStats as MemStats
    from thermocline.tables.mem import MemTier as MemTier
    from thermocline.tables.optimizers import SGD as SGD
    from thermocline.tables.optimizers import Adagrad as Adagrad
    from thermocline.tables.optimizers import Adam as Adam
    from thermocline.tables.optimizers import RowWiseAdagrad as RowWiseAdagrad
    from thermocline.tables.reference import ReferenceTable as ReferenceTable
    from thermocline.tables.ssd import SsdStats as SsdStats
    from thermocline.tables.ssd import SsdStore as SsdStore
    from thermocline.tables.table import Table as Table
    from thermocline.train import TrainConfig as TrainConfig
    from thermocline.train import Trainer as Trainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'thermocline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"thermocline.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
