"""Deep & Cross networks: explicit products of features beside an MLP. Dense features are vectors among the others."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from thermocline.config.model import ModelConfig
from thermocline.embedding.table import Table
from thermocline.models.layers import Model, hidden_layers, linear


class CrossModel(Model):
    """Cross layers and hidden layers side by side over all vectors x0 in a row, one output layer over both.

    A dense feature x is x times its vector. Without hidden layers the output layer sees the cross layers alone.
    """

    cross_layer: ClassVar[type[nn.Module]]
    """(x0, x) -> the x after it."""

    def __init__(self, config: ModelConfig, table: Table, fields: int, dense: int) -> None:
        super().__init__(config, table, fields, dense)
        self.cross = nn.ModuleList(self.cross_layer(self.width) for _ in range(config.cross_layers or 0))
        self.net = hidden_layers(config, self.width, None) if config.hidden else None
        self.out = linear(self.width + (config.hidden[-1] if config.hidden else 0), 1)

    def score(self, rows: Tensor) -> Tensor:
        start = crossed = rows.flatten(1)
        for layer in self.cross:
            crossed = layer(start, crossed)
        both = crossed if self.net is None else torch.cat([crossed, self.net(start)], 1)
        logits: Tensor = self.out(both).squeeze(1)
        return logits


class VectorCross(nn.Module):
    """x + x0 * (w . x) + b."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, start: Tensor, crossed: Tensor) -> Tensor:
        product: Tensor = start * self.weight(crossed)
        return crossed + product + self.bias


class MatrixCross(nn.Module):
    """x + x0 * (W x + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = linear(width, width)

    def forward(self, start: Tensor, crossed: Tensor) -> Tensor:
        product: Tensor = start * self.weight(crossed)
        return crossed + product


class DCN(CrossModel):
    """Deep & Cross: each cross layer is a vector."""

    cross_layer = VectorCross


class DCNv2(CrossModel):
    """Deep & Cross, second version: each cross layer is a matrix; parallel structure."""

    cross_layer = MatrixCross
