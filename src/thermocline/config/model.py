"""What a model is made of: `tc.ModelConfig`. Needs no torch, so that a config file is checked before torch loads."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

from thermocline.errors import require

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
"""Settings of the BARS leaderboard for Frappe_x1, where a model's differ from the fields' own defaults."""

NAMES: tuple[ModelName, ...] = tuple(BARS)
WEIGHTED: tuple[ModelName, ...] = ("lr", "fm", "widedeep", "deepfm")
"""Models that have a linear weight per key: it comes first in the key's row."""

_OTHERWISE = {"dropout": 0.0, "embedding_l2": 0.05, "cross_layers": 3}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model and its sizes. What is None is as in the BARS x1 settings of that model: `resolve` fills it in.

    A field that a model has no use for is ignored by it: LR has no hidden layers, only DCN and DCNv2 have cross layers.
    """

    name: ModelName = "dnn"
    """Which one."""
    dim: int = 10
    """Floats of a key's vector. FM, Wide&Deep and DeepFM keep the key's linear weight beside it; LR has only that."""
    hidden: tuple[int, ...] = (400, 400, 400)
    """Widths of the hidden layers; none: the network is its output layer alone, DCN, DCNv2 and AutoInt have none."""
    dropout: float | None = None
    """Share of hidden values dropped in training, after each hidden layer (in AutoInt of attention weights, too)."""
    batch_norm: bool = True
    """Batch norm between each hidden layer and its ReLU."""
    embedding_l2: float | None = None
    """L2 of the rows a step touches (and of dense features' vectors): the table's weight_decay. Frappe_x1 wants much,
    0.05; for data as sparse as Criteo's the BARS settings say 1e-5."""
    net_l2: float = 0.0
    """L2 of all other parameters."""
    pooling: Literal["sum", "mean"] = "sum"
    """What becomes of a field's several keys."""
    initial: float = 1e-4
    """Standard deviation of new rows: the table's `tc.Normal(scale=...)`."""
    cross_layers: int | None = None
    """DCN and DCNv2."""
    interaction: Literal["dot", "cat"] = "dot"
    """DLRM: products of all pairs of vectors, as in its paper; or the vectors themselves, as BARS had for Frappe_x1."""
    bottom: tuple[int, ...] = (400, 400, 400)
    """DLRM: hidden layers from the dense features to a vector."""
    attention_layers: int = 5
    """AutoInt."""
    attention_dim: int = 128
    """AutoInt: of a field's vector after each attention layer; divided among the heads."""
    heads: int = 4
    """AutoInt."""

    def __post_init__(self) -> None:
        self._require("name", self.name in BARS, f"one of {', '.join(BARS)}")
        for name in ("dim", "attention_layers", "attention_dim", "heads"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("hidden", "bottom"):
            self._require(name, all(width >= 1 for width in getattr(self, name)), "widths of at least 1")
        self._require("dropout", self.dropout is None or 0 <= self.dropout < 1, "from 0 to below 1")
        self._require("cross_layers", self.cross_layers is None or self.cross_layers >= 1, "at least 1")
        for name in ("embedding_l2", "net_l2", "initial"):
            value = getattr(self, name)
            self._require(name, value is None or 0 <= value < float("inf"), "a finite number, not negative")
        self._require("pooling", self.pooling in ("sum", "mean"), "sum or mean")
        self._require("interaction", self.interaction in ("dot", "cat"), "dot or cat")
        self._require("attention_dim", self.attention_dim % self.heads == 0, f"a multiple of heads, {self.heads}")

    def _require(self, name: str, fine: bool, rule: str) -> None:
        require(fine, f"ModelConfig.{name}", getattr(self, name), rule)

    def resolve(self) -> Self:
        """The same with every None filled in."""
        settings = {**_OTHERWISE, **BARS[self.name]}
        return dataclasses.replace(self, **{k: v for k, v in settings.items() if getattr(self, k) is None})


def row_dim(config: ModelConfig) -> int:
    """Floats of weights per key: the table's `dim`."""
    return (config.name in WEIGHTED) + (0 if config.name == "lr" else config.dim)
