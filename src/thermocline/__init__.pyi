"""Public names of the package and their modules: read by type checkers, and by lazy_loader at run time."""

import thermocline.data.feature_hashing as _feature_hashing
import thermocline.embedding.torch_modules as _torch_modules

from .batch import Batch as Batch, WorkingSet as WorkingSet
from .checkpoint.export import export_rows as export_rows
from .checkpoint.manager import Checkpoint as Checkpoint, Checkpoints as Checkpoints
from .checkpoint.model_state import ModelState as ModelState
from .config.data import Data as Data, Numeric as Numeric
from .config.dense_sync import DenseSync as DenseSync
from .config.distributed import Dist as Dist
from .config.lr_schedule import Schedule as Schedule
from .config.model import ModelConfig as ModelConfig
from .config.publish import Publish as Publish
from .config.schema import Config as Config, Rows as Rows, Train as Train
from .config.train import TrainConfig as TrainConfig
from .data.collate import Collate as Collate
from .data.reader import Reader as Reader
from .data.synthetic import SyntheticAds as SyntheticAds
from .data.value_keys import key_of as key_of
from .distributed.communicator import Groups as Groups
from .distributed.dense_sync import DenseParameters as DenseParameters
from .distributed.frozen_adam import FrozenAdam as FrozenAdam
from .distributed.launch import join_ranks as join_ranks
from .distributed.sharded_table import ShardedTable as ShardedTable
from .distributed.topology import Topology as Topology
from .embedding.admission import Admission as Admission
from .embedding.bag import EmbeddingBag as EmbeddingBag
from .embedding.bags_side_by_side import EmbeddingBags as EmbeddingBags
from .embedding.expiry import Expiry as Expiry
from .embedding.initializers import Constant as Constant, Normal as Normal, Uniform as Uniform
from .embedding.optimizers import (
    SGD as SGD,
    Adagrad as Adagrad,
    Adam as Adam,
    PartialRowWiseAdam as PartialRowWiseAdam,
    RowWiseAdagrad as RowWiseAdagrad,
)
from .embedding.precision import Precision as Precision
from .embedding.reference import ReferenceTable as ReferenceTable
from .embedding.row_optimizer import RowOptimizer as RowOptimizer
from .embedding.shared_tiers import Tiers as Tiers
from .embedding.state_dict import (
    load_state_dict as load_state_dict,
    state_dict as state_dict,
)
from .embedding.table import Table as Table
from .errors import (
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
from .pipeline.prefetch import prefetch as prefetch
from .tiers.dram import DramStats as DramStats, DramTier as DramTier
from .tiers.hbm import HbmStats as HbmStats, HbmTier as HbmTier
from .tiers.ssd import SsdStats as SsdStats, SsdStore as SsdStore
from .training.callbacks import Callback as Callback
from .training.metrics import (
    AUC as AUC,
    Calibration as Calibration,
    ExactMetrics as ExactMetrics,
    LogLoss as LogLoss,
    NormalizedEntropy as NormalizedEntropy,
    StreamingAUC as StreamingAUC,
    StreamingMetrics as StreamingMetrics,
    auc as auc,
)
from .training.run import Run as Run
from .training.state import Progress as Progress, Result as Result
from .training.trainer import Trainer as Trainer

__version__: str
hashing = _feature_hashing
nn = _torch_modules
