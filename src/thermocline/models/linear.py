"""Models without hidden layers: logistic regression and the factorization machine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thermocline.config.model import ModelConfig
from thermocline.embedding.table import Table
from thermocline.models.layers import Model


class LR(Model):
    """Logistic regression: the sum of all features' weights, and a bias. A dense feature adds value times weight."""

    def __init__(self, config: ModelConfig, table: Table, fields: int, dense: int) -> None:
        super().__init__(config, table, fields, dense)
        self.bias = nn.Parameter(torch.zeros(()))

    def score(self, rows: Tensor) -> Tensor:
        return rows.sum((1, 2)) + self.bias


class FM(Model):
    """Factorization machine: LR, plus the products of all pairs of features' vectors.

    Rows are a weight, then a vector. A dense feature x adds x times its weight, and takes part in pairs as x times its
    vector. Pairs are of fields: keys that share a field are pooled first.
    """

    def __init__(self, config: ModelConfig, table: Table, fields: int, dense: int) -> None:
        super().__init__(config, table, fields, dense)
        self.bias = nn.Parameter(torch.zeros(()))

    def score(self, rows: Tensor) -> Tensor:
        return first_order(rows) + second_order(rows[..., 1:]) + self.bias


def first_order(rows: Tensor) -> Tensor:
    """[n, f, 1 + d] -> [n]: the sum of the linear weights, which come first in their rows."""
    return rows[..., 0].sum(1)


def second_order(vectors: Tensor) -> Tensor:
    """[n, f, d] -> [n]: products of all pairs of vectors, as half of (square of the sum minus sum of the squares)."""
    return (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
