"""Small collections of `thermocline.torchrec` and ids for them."""

from __future__ import annotations

from typing import Any

import torch

import thermocline as tc
from thermocline.torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor


def config(name: str = "t", **more: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(**{"num_embeddings": 50, "embedding_dim": 4, "name": name, "feature_names": [], **more})


def bags(*configs: EmbeddingBagConfig, **more: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(configs or [config()], **{"optimizer": tc.SGD(lr=0.5), **more})


def features(*keys: str, seed: int = 0, examples: int = 3) -> KeyedJaggedTensor:
    rng = torch.Generator().manual_seed(seed)
    keys = keys or ("t",)
    lengths = torch.randint(0, 4, (len(keys) * examples,), generator=rng)
    values = torch.randint(0, 50, (int(lengths.sum()),), generator=rng)
    return KeyedJaggedTensor(keys, values, lengths=lengths)


def fill(value: float, weights: torch.Tensor) -> torch.Tensor:
    return weights.fill_(value)
