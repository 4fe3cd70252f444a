"""Layers that the models share: feature rows of a batch, hidden layers, and weight initialization.

Shapes: n examples, f features (fields of keys, then dense features), d floats per row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thermocline.batch import Batch
from thermocline.config.model import WEIGHTED, ModelConfig
from thermocline.embedding.bag import EmbeddingBag
from thermocline.embedding.table import Table


class Model(nn.Module):
    """Base of the models: maps a Batch to float32[n] logits, through the rows of its features.

    `score` takes and returns plain tensors, without keys or tables: it can be compiled or exported separately.
    """

    def __init__(self, config: ModelConfig, table: Table, fields: int, dense: int) -> None:
        super().__init__()
        self.config = config
        self.features = Features(table, fields, dense, config.pooling, weighted=config.name in WEIGHTED)
        self.width = (fields + dense) * config.dim
        """Floats in the concatenated vectors of one example."""

    def forward(self, batch: Batch) -> Tensor:
        return self.score(self.features(batch))

    def score(self, rows: Tensor) -> Tensor:
        """Compute logits from rows: float32[n, f, d] -> float32[n]."""
        raise NotImplementedError


class Features(nn.Module):
    """Maps a Batch to float32[n, f, d]: the pooled row of each field, then value times row of each dense feature.

    A dense feature behaves like a field with one key, weighted by the value. Its row is a parameter of the model: the
    vector is initialized like FuxiCTR's (Xavier); the linear weight, if rows have one (`weighted`), is 0.
    """

    def __init__(self, table: Table, fields: int, dense: int, pooling: str, *, weighted: bool) -> None:
        super().__init__()
        self.dense = dense
        self.bag = EmbeddingBag(table, fields, pooling="mean" if pooling == "mean" else "sum")
        self.numbers = None
        if dense:
            size = table.dim - weighted
            vectors = math.sqrt(2 / (1 + size)) * torch.randn(dense, size)
            self.numbers = nn.Parameter(torch.cat([torch.zeros(dense, int(weighted)), vectors], 1))

    def forward(self, batch: Batch) -> Tensor:
        rows: Tensor = self.bag(batch)
        if self.numbers is None:
            return rows
        values = dense_values(batch, self.dense, rows)
        return torch.cat([rows, values.unsqueeze(2) * self.numbers], 1)


def dense_values(batch: Batch, dense: int, like: Tensor) -> Tensor:
    """Return the dense features as float32[n, dense] on the device of `like`; check their shape."""
    if batch.dense is None:
        raise ValueError(f"batch.dense is None, but the model was built for {dense} dense features")
    values = torch.as_tensor(batch.dense).to(device=like.device, dtype=like.dtype)
    if values.shape != (batch.examples, dense):
        raise ValueError(
            f"batch.dense has shape {list(values.shape)}: expected {[batch.examples, dense]}, since the model "
            f"was built for {dense} dense features"
        )
    return values


class BatchNorm(nn.BatchNorm1d):
    """nn.BatchNorm1d that accepts a training batch of one example: normalized as in evaluation, statistics unchanged.

    One example has no variance: torch raises an error, which would end a training at the last batch of an epoch.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.training and len(input) == 1:
            return nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        return super().forward(input)


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """Linear layer initialized like FuxiCTR's: Xavier normal weights, zero bias."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.xavier_normal_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, hidden: Sequence[int], outputs: int | None, *, dropout: float, batch_norm: bool) -> nn.Sequential:
    """Build hidden layers (linear, batch norm, ReLU, dropout each), then a linear layer unless `outputs` is None."""
    layers: list[nn.Module] = []
    for width, next_width in itertools.pairwise([inputs, *hidden]):
        layers.append(linear(width, next_width))
        if batch_norm:
            layers.append(BatchNorm(next_width))
        layers.append(nn.ReLU())
        if dropout:
            layers.append(nn.Dropout(dropout))
    if outputs is not None:
        layers.append(linear([inputs, *hidden][-1], outputs))
    return nn.Sequential(*layers)


def hidden_layers(config: ModelConfig, inputs: int, outputs: int | None = 1) -> nn.Sequential:
    """Build the hidden layers of the config."""
    return mlp(inputs, config.hidden, outputs, dropout=config.dropout or 0.0, batch_norm=config.batch_norm)
