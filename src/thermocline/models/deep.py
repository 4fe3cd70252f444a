"""MLP over embeddings, alone (DNN) or plus a model of `linear.py`. A dense feature is a vector like a field."""

from __future__ import annotations

from torch import Tensor

from thermocline.config.model import ModelConfig
from thermocline.embedding.table import Table
from thermocline.models.layers import Model, hidden_layers
from thermocline.models.linear import first_order, second_order


class DNN(Model):
    """Hidden layers over the concatenated vectors of all features; a dense feature x is x times its vector."""

    def __init__(self, config: ModelConfig, table: Table, fields: int, dense: int) -> None:
        super().__init__(config, table, fields, dense)
        self.net = hidden_layers(config, self.width)

    def score(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.net(rows.flatten(1)).squeeze(1)
        return logits


class WideDeep(DNN):
    """DNN plus LR. A row is a weight (wide) followed by a vector (deep); a dense feature has both."""

    def score(self, rows: Tensor) -> Tensor:
        return first_order(rows) + super().score(rows[..., 1:])


class DeepFM(DNN):
    """DNN plus FM over the same vectors. A row is a weight followed by a vector; a dense feature has both."""

    def score(self, rows: Tensor) -> Tensor:
        vectors = rows[..., 1:]
        return first_order(rows) + second_order(vectors) + super().score(vectors)
