"""A drop-in for the part of TorchRec that models use: collections, configs and keyed tensors, on `tc.Table`.

    from thermocline.torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

Replaces these imports from `torchrec`; torchrec itself is not imported. Configs and KeyedJaggedTensors of torchrec are
accepted as well. docs/porting.md shows a port.
"""

from thermocline.torchrec.collections import EmbeddingBagCollection, EmbeddingCollection
from thermocline.torchrec.configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from thermocline.torchrec.in_backward import apply_optimizer_in_backward
from thermocline.torchrec.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from thermocline.torchrec.keyed_tensor import KeyedTensor
from thermocline.torchrec.train_pipeline import TrainPipelineSparseDist, prefetch

__all__ = [
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
    "TrainPipelineSparseDist",
    "apply_optimizer_in_backward",
    "prefetch",
]
