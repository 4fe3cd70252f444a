"""`ModelConfig`, the section [model]. Imports no torch, so that a config file is checked before torch loads."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Lt
from pydantic import model_validator

from thermocline.config.fields import Count, Items, Maybe, NonNegative
from thermocline.config.messages import reject
from thermocline.config.section import section

ModelName = Literal["lr", "fm", "dnn", "widedeep", "deepfm", "dcn", "dcnv2", "dlrm", "autoint"]

BARS: dict[ModelName, dict[str, Any]] = {
    "lr": {"embedding_l2": 1e-5},
    "fm": {"embedding_l2": 5e-6},
    "dnn": {"dropout": 0.2},
    "widedeep": {"dropout": 0.6, "embedding_l2": 0.1},
    "deepfm": {"dropout": 0.2},
    "dcn": {"dropout": 0.2, "cross_layers": 3},
    "dcnv2": {"dropout": 0.4, "cross_layers": 4},
    "dlrm": {"dropout": 0.4, "embedding_l2": 0.1},
    "autoint": {"dropout": 0.1, "embedding_l2": 0.1},
}
"""Settings of the BARS leaderboard for Frappe_x1, where they differ from `_DEFAULTS`."""

NAMES: tuple[ModelName, ...] = tuple(BARS)
WEIGHTED: tuple[ModelName, ...] = ("lr", "fm", "widedeep", "deepfm")
"""Models with a linear weight per key, which is the first float of the key's row."""

_DEFAULTS = {"dropout": 0.0, "embedding_l2": 0.05, "cross_layers": 3}


@section("model")
class ModelConfig:
    """A model and its sizes. `resolve` replaces None by the BARS x1 setting of the model.

    A model ignores fields that it does not use: LR has no hidden layers, only DCN and DCNv2 have cross layers.
    """

    name: ModelName = "dnn"
    """Architecture."""
    dim: Count = 10
    """Floats of a key's vector. FM, Wide&Deep and DeepFM add the key's linear weight; LR has only the weight."""
    hidden: Items[Count] = (400, 400, 400)
    """Widths of the hidden layers. If empty, the network is its output layer; DCN, DCNv2 and AutoInt then have no
    network."""
    dropout: Maybe[Annotated[float, Ge(0), Lt(1)]] = None
    """Fraction of hidden values dropped in training, after each hidden layer (in AutoInt also of attention weights)."""
    batch_norm: bool = True
    """Batch norm between each hidden layer and its ReLU."""
    embedding_l2: Maybe[NonNegative] = None
    """L2 of the rows of a step (and of dense features' vectors): the table's weight_decay. BARS uses 0.05 for Frappe_x1
    and 1e-5 for data as sparse as Criteo's."""
    net_l2: NonNegative = 0.0
    """L2 of all other parameters."""
    pooling: Literal["sum", "mean"] = "sum"
    """Pooling of several keys of one field."""
    initial: NonNegative = 1e-4
    """Standard deviation of new rows: the table's `tc.Normal(scale=...)`."""
    cross_layers: Maybe[Count] = None
    """DCN and DCNv2: number of cross layers."""
    interaction: Literal["dot", "cat"] = "dot"
    """DLRM. dot: products of all pairs of vectors, as Naumov et al. (2019). cat: vectors, as BARS for Frappe_x1."""
    bottom: Items[Count] = (400, 400, 400)
    """DLRM: widths of the hidden layers between the dense features and their vector."""
    attention_layers: Count = 5
    """AutoInt: number of attention layers."""
    attention_dim: Count = 128
    """AutoInt: size of a field's vector after each attention layer, divided among the heads."""
    heads: Count = 4
    """AutoInt: attention heads."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.attention_dim % self.heads:
            reject("attention_dim", self.attention_dim, f"a multiple of heads, {self.heads}")
        return self

    def resolve(self) -> Self:
        """Return a copy with every None filled in."""
        settings = {**_DEFAULTS, **BARS[self.name]}
        return dataclasses.replace(self, **{k: v for k, v in settings.items() if getattr(self, k) is None})


def row_dim(config: ModelConfig) -> int:
    """Return the floats of weights per key: the table's `dim`."""
    return (config.name in WEIGHTED) + (0 if config.name == "lr" else config.dim)
