"""Deep & Cross networks: cross layers in parallel with an MLP. A dense feature is a vector like a field."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from thermocline.config.model import ModelConfig
from thermocline.embedding.table import Table
from thermocline.models.layers import Model, hidden_layers, linear


class CrossModel(Model):
    """Cross layers and hidden layers in parallel over the concatenated vectors x0, and one output layer over both.

    A dense feature x is x times its vector. Without hidden layers the output layer has only the cross layers as input.
    """

    cross_layer: ClassVar[type[nn.Module]]
    """Maps (x0, x) to the next x."""

    def __init__(self, config: ModelConfig, table: Table, fields: int, dense: int) -> None:
        super().__init__(config, table, fields, dense)
        self.cross = nn.ModuleList(self.cross_layer(self.width) for _ in range(config.cross_layers or 0))
        self.net = hidden_layers(config, self.width, None) if config.hidden else None
        self.out = linear(self.width + (config.hidden[-1] if config.hidden else 0), 1)

    def score(self, rows: Tensor) -> Tensor:
        x0 = x = rows.flatten(1)
        for layer in self.cross:
            x = layer(x0, x)
        both = x if self.net is None else torch.cat([x, self.net(x0)], 1)
        logits: Tensor = self.out(both).squeeze(1)
        return logits


class VectorCross(nn.Module):
    """x + x0 * (w . x) + b."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        product: Tensor = x0 * self.weight(x)
        return x + product + self.bias


class MatrixCross(nn.Module):
    """x + x0 * (W x + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = linear(width, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        product: Tensor = x0 * self.weight(x)
        return x + product


class DCN(CrossModel):
    """Deep & Cross: the weight of a cross layer is a vector."""

    cross_layer = VectorCross


class DCNv2(CrossModel):
    """Deep & Cross v2: the weight of a cross layer is a matrix; parallel structure."""

    cross_layer = MatrixCross
