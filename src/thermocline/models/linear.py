"""Models without hidden layers: logistic regression and factorization machine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thermocline.config.model import ModelConfig
from thermocline.embedding.table import Table
from thermocline.models.layers import Model


class LR(Model):
    """Logistic regression: the sum of the features' weights plus a bias. A dense feature adds value times weight."""

    def __init__(self, config: ModelConfig, table: Table, fields: int, dense: int) -> None:
        super().__init__(config, table, fields, dense)
        self.bias = nn.Parameter(torch.zeros(()))

    def score(self, rows: Tensor) -> Tensor:
        return rows.sum((1, 2)) + self.bias


class FM(Model):
    """Factorization machine: LR plus the dot products of all pairs of the features' vectors.

    A row is a weight followed by a vector. A dense feature x adds x times its weight, and its vector is scaled by x.
    Pairs are pairs of fields: the keys of one field are pooled first.
    """

    def __init__(self, config: ModelConfig, table: Table, fields: int, dense: int) -> None:
        super().__init__(config, table, fields, dense)
        self.bias = nn.Parameter(torch.zeros(()))

    def score(self, rows: Tensor) -> Tensor:
        return first_order(rows) + second_order(rows[..., 1:]) + self.bias


def first_order(rows: Tensor) -> Tensor:
    """Sum the linear weights, the first element of each row: [n, f, 1 + d] -> [n]."""
    return rows[..., 0].sum(1)


def second_order(vectors: Tensor) -> Tensor:
    """Sum the dot products of all pairs of vectors: [n, f, d] -> [n].

    Computed as half of (square of the sum - sum of the squares).
    """
    return (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
