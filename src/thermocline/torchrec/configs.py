"""Configs of tables, as in TorchRec, and their translation to the arguments of `tc.Table`."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from thermocline.embedding.initializers import Constant, Initial, Normal, Uniform
from thermocline.embedding.precision import Kind


class PoolingType(enum.Enum):
    """How the vectors of a bag are combined."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class DataType(enum.Enum):
    """Stored precision of weights."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"


@dataclasses.dataclass(kw_only=False)
class EmbeddingConfig:
    """A table of `EmbeddingCollection`, with the fields of TorchRec 1.8 at the same positions.

    feature_names    empty: the feature has the name of the table
    num_embeddings   the initial rows are uniform within sqrt(1 / num_embeddings), and the default memory holds this
                     number of rows. Ids beyond it are accepted unless the collection has `check_ids`
    init_fn          initializer of torch.nn.init, or any function that fills float32[num_embeddings, embedding_dim]

    A collection refuses other values than the default of num_embeddings_post_pruning, need_pos, input_dim,
    total_num_buckets, use_virtual_table, virtual_table_eviction_policy, enable_embedding_update and stash_weights.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = dataclasses.field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    num_embeddings_post_pruning: int | None = None
    init_fn: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    need_pos: bool = False
    input_dim: int | None = None
    total_num_buckets: int | None = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: Any = None
    enable_embedding_update: bool = False
    stash_weights: bool = False


@dataclasses.dataclass(kw_only=False)
class EmbeddingBagConfig(EmbeddingConfig):
    """A table of `EmbeddingBagCollection`."""

    pooling: PoolingType = PoolingType.SUM


_HONOURED = (
    "num_embeddings",
    "embedding_dim",
    "name",
    "data_type",
    "feature_names",
    "weight_init_max",
    "weight_init_min",
    "init_fn",
)
_REFUSED = {field.name: field.default for field in dataclasses.fields(EmbeddingConfig) if field.name not in _HONOURED}
"""Fields of TorchRec's configs that have no effect here, and their defaults."""


def check_config(config: Any) -> None:
    """Raise ValueError if a config, ours or TorchRec's, asks for something that is not supported."""
    for name, default in _REFUSED.items():
        if getattr(config, name, default) != default:
            raise ValueError(
                f"table {config.name!r}: {name} is {getattr(config, name)!r}: it is not supported; leave it {default!r}"
            )
    if config.num_embeddings < 1 or config.embedding_dim < 1:
        raise ValueError(
            f"table {config.name!r} has num_embeddings {config.num_embeddings} and embedding_dim "
            f"{config.embedding_dim}: both must be at least 1"
        )


def feature_names(config: Any) -> list[str]:
    """Return the features of a table."""
    return list(config.feature_names) or [config.name]


def pooling_of(config: Any) -> Any:
    """Return the pooling of a bag: "sum" or "mean"."""
    name = config.pooling.name
    if name not in ("SUM", "MEAN"):
        raise ValueError(f"table {config.name!r}: pooling is {name}: it must be SUM or MEAN")
    return name.lower()


def precision_of(config: Any) -> Kind:
    """Return the stored precision of a table."""
    kinds: dict[str, Kind] = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16"}
    name = config.data_type.name
    if name not in kinds:
        raise ValueError(f"table {config.name!r}: data_type is {name}: it must be FP32, FP16 or BF16")
    return kinds[name]


def initial_of(config: Any) -> tuple[Initial, bool]:
    """Return the initializer of a table, and whether `init_fn` must fill its rows instead."""
    known = _known_initial(_init_function(config))
    return (Uniform(scale=math.sqrt(1 / config.num_embeddings)), True) if known is None else (known, False)


def _init_function(config: Any) -> Any:
    """Return `init_fn`, or the uniform default."""
    if config.init_fn is not None:
        return config.init_fn
    default = math.sqrt(1 / config.num_embeddings)
    low = -default if config.weight_init_min is None else config.weight_init_min
    high = default if config.weight_init_max is None else config.weight_init_max
    return functools.partial(torch.nn.init.uniform_, a=low, b=high)


def _known_initial(function: Any) -> Initial | None:
    """Return the equal initializer that is a function of the key; None: there is none."""
    if not isinstance(function, functools.partial):
        function = functools.partial(function)
    target, given = function.func, dict(function.keywords)
    if function.args:
        return None
    if target is torch.nn.init.uniform_ and given.keys() <= {"a", "b"}:
        low, high = given.get("a", 0.0), given.get("b", 1.0)
        return Uniform(scale=float(high)) if low == -high else None
    if target is torch.nn.init.normal_ and given.keys() <= {"mean", "std"} and not given.get("mean", 0.0):
        return Normal(scale=float(given.get("std", 1.0)))
    if target is torch.nn.init.zeros_ and not given:
        return Constant(value=0.0)
    if target is torch.nn.init.constant_ and given.keys() == {"val"}:
        return Constant(value=float(given["val"]))
    return None


def filled_rows(config: Any, limit: int) -> torch.Tensor:
    """Return float32[num_embeddings, embedding_dim], filled by the initializer of the config."""
    size = 4 * config.num_embeddings * config.embedding_dim
    if size > limit:
        raise ValueError(
            f"table {config.name!r}: init_fn, or an interval that is not symmetric, fills all {config.num_embeddings} "
            f"rows in {size >> 20} MiB of memory, more than {limit >> 20} MiB: use torch.nn.init.uniform_(a=-x, b=x), "
            "normal_(mean=0), constant_ or zeros_, which are computed per row, or table.load_rows"
        )
    rows = torch.empty(config.num_embeddings, config.embedding_dim)
    with torch.no_grad():
        filled = _init_function(config)(rows)
    return (rows if filled is None else filled).detach().float().contiguous()
