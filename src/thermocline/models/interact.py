"""Models with pairwise feature interactions: DLRM by dot products, AutoInt by attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thermocline.batch import Batch
from thermocline.config.model import ModelConfig
from thermocline.embedding.table import Table
from thermocline.models.layers import Model, dense_values, hidden_layers, linear, mlp


class DLRM(Model):
    """Dot products of all pairs of vectors, then hidden layers.

    The `bottom` MLP maps all dense features to one more vector, which is also an input of the hidden layers. With
    `interaction="cat"` the concatenated vectors replace the products.
    """

    def __init__(self, config: ModelConfig, table: Table, fields: int, dense: int) -> None:
        super().__init__(config, table, fields, 0)
        self.dense = dense
        self.bottom = None
        if dense:
            layers = mlp(dense, config.bottom, config.dim, dropout=0.0, batch_norm=config.batch_norm)
            self.bottom = nn.Sequential(layers, nn.ReLU())
        vectors = fields + bool(dense)
        self.pairs: Tensor
        first, second = torch.triu_indices(vectors, vectors, 1)
        self.register_buffer("pairs", first * vectors + second, persistent=False)
        inputs = vectors * config.dim
        if config.interaction == "dot":
            inputs = len(self.pairs) + config.dim * bool(dense)
        if not inputs:
            raise ValueError(
                'DLRM needs two vectors for a product: add a field or dense features, or set interaction="cat"'
            )
        self.net = hidden_layers(config, inputs)

    def forward(self, batch: Batch) -> Tensor:
        rows = self.features(batch)
        if self.bottom is None:
            return self.score(rows)
        vector = self.bottom(dense_values(batch, self.dense, rows))
        return self.score(torch.cat([rows, vector.unsqueeze(1)], 1))

    def score(self, rows: Tensor) -> Tensor:
        if self.config.interaction == "cat":
            inputs = rows.flatten(1)
        else:
            # Not by two indices: their backward pass sorts all products on a GPU.
            inputs = (rows @ rows.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
            if self.bottom is not None:
                inputs = torch.cat([inputs, rows[:, -1]], 1)
        logits: Tensor = self.net(inputs).squeeze(1)
        return logits


class AutoInt(Model):
    """Self-attention layers over the features' vectors, plus hidden layers in parallel (AutoInt+).

    A dense feature x is x times its vector. Without hidden layers this is the original AutoInt.
    """

    def __init__(self, config: ModelConfig, table: Table, fields: int, dense: int) -> None:
        super().__init__(config, table, fields, dense)
        width, dropout = config.attention_dim, config.dropout or 0.0
        inputs = [config.dim, *[width] * (config.attention_layers - 1)]
        self.attention = nn.Sequential(*(Attention(size, width, config.heads, dropout) for size in inputs))
        self.out = linear((fields + dense) * width, 1)
        self.net = hidden_layers(config, self.width) if config.hidden else None

    def score(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.out(self.attention(rows).flatten(1)).squeeze(1)
        return logits if self.net is None else logits + self.net(rows.flatten(1)).squeeze(1)


class Attention(nn.Module):
    """Multi-head self-attention, [n, f, inputs] -> [n, f, outputs], then residual, layer norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = linear(inputs, outputs, bias=False)
        self.key = linear(inputs, outputs, bias=False)
        self.value = linear(inputs, outputs, bias=False)
        self.residual = nn.Identity() if inputs == outputs else linear(inputs, outputs, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._split(part(x)) for part in (self.query, self.key, self.value))
        # torch's fused attention is not used: the sums of its backward pass have no fixed order on a GPU.
        scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
        heads = self.dropout(scores.softmax(3)) @ value
        joined: Tensor = heads.transpose(1, 2).flatten(2) + self.residual(x)
        return torch.relu(self.norm(joined))

    def _split(self, x: Tensor) -> Tensor:
        """[n, f, outputs] -> [n, heads, f, outputs / heads]."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)
