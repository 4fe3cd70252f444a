"""What the models share: rows of a batch's features, hidden layers, and how weights begin.

Shapes: n examples, f features (fields of keys, then dense ones), d floats per row.
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
    """What every model is: Batch -> float32[n] logits, by way of the features' rows.

    `score` knows neither keys nor tables: plain tensors in and out, which can be compiled or exported by itself.
    """

    def __init__(self, config: ModelConfig, table: Table, fields: int, dense: int) -> None:
        super().__init__()
        self.config = config
        self.features = Features(table, fields, dense, config.pooling, weighted=config.name in WEIGHTED)
        self.width = (fields + dense) * config.dim
        """Floats of all vectors of one example."""

    def forward(self, batch: Batch) -> Tensor:
        return self.score(self.features(batch))

    def score(self, rows: Tensor) -> Tensor:
        """float32[n, f, d] -> float32[n]."""
        raise NotImplementedError


class Features(nn.Module):
    """Batch -> float32[n, f, d]: the pooled row of each field, then value times row for each dense feature.

    So a dense feature is a field like any other whose one key has the value as its weight. Its row is a parameter: the
    vector begins as FuxiCTR's does (Xavier), the linear weight, where rows have one (`weighted`), at zero.
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
    """float32[n, dense] where `like` is; an error if the batch has others."""
    if batch.dense is None:
        raise ValueError(f"the model was built for {dense} dense features, but the batch has none")
    values = torch.as_tensor(batch.dense).to(device=like.device, dtype=like.dtype)
    if values.shape != (batch.examples, dense):
        raise ValueError(
            f"batch.dense has shape {list(values.shape)}: {batch.examples} examples of a model with {dense} dense "
            f"features need {[batch.examples, dense]}"
        )
    return values


class BatchNorm(nn.BatchNorm1d):
    """torch's, except that a training batch of one example is normalised as in evaluation and changes no statistics.

    One example has no variance: torch raises an error, which would end a run at the last batch of an epoch.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.training and len(input) == 1:
            return nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        return super().forward(input)


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """Begins as FuxiCTR's: Xavier normal, bias zero."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.xavier_normal_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, hidden: Sequence[int], outputs: int | None, *, dropout: float, batch_norm: bool) -> nn.Sequential:
    """Hidden layers, each linear, batch norm, ReLU, dropout; then a linear layer to `outputs`, if that is given."""
    layers: list[nn.Module] = []
    for width, after in itertools.pairwise([inputs, *hidden]):
        layers.append(linear(width, after))
        if batch_norm:
            layers.append(BatchNorm(after))
        layers.append(nn.ReLU())
        if dropout:
            layers.append(nn.Dropout(dropout))
    if outputs is not None:
        layers.append(linear([inputs, *hidden][-1], outputs))
    return nn.Sequential(*layers)


def hidden_layers(config: ModelConfig, inputs: int, outputs: int | None = 1) -> nn.Sequential:
    """The model's own network, as its config has it."""
    return mlp(inputs, config.hidden, outputs, dropout=config.dropout or 0.0, batch_norm=config.batch_norm)
