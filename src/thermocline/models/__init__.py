"""Standard CTR models with one interface: `build(config, table, fields, dense)` returns Batch -> logits[examples].

Sizes and regularization default to the BARS x1 settings; dense weights are initialized like FuxiCTR's, from torch's
seed. A training also needs a table with rows of `row_dim(config)` weights, initial values
`tc.Normal(scale=config.initial)` and an optimizer with `weight_decay=config.resolve().embedding_l2`; and a dense
optimizer over `parameter_groups(config, model)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thermocline.config.model import NAMES, ModelConfig, row_dim

if TYPE_CHECKING:
    from thermocline.embedding.table import Table
    from thermocline.models.layers import Model

__all__ = ["NAMES", "ModelConfig", "build", "parameter_groups", "row_dim"]


def build(config: ModelConfig, table: Table, fields: int, dense: int = 0) -> Model:
    """Build a model for `fields` fields of keys and `dense` dense features, with weights drawn from torch's seed."""
    from thermocline.models import cross, deep, interact, linear  # imported here because they import torch

    classes: dict[str, type[Model]] = {
        "lr": linear.LR,
        "fm": linear.FM,
        "dnn": deep.DNN,
        "widedeep": deep.WideDeep,
        "deepfm": deep.DeepFM,
        "dcn": cross.DCN,
        "dcnv2": cross.DCNv2,
        "dlrm": interact.DLRM,
        "autoint": interact.AutoInt,
    }
    if fields < 1:
        raise ValueError(f"fields is {fields}: {config.name} needs at least one field of keys besides dense features")
    if table.dim != row_dim(config):
        raise ValueError(
            f"table {table.name!r} has dim {table.dim}: {config.name} with model.dim {config.dim} needs "
            f"{row_dim(config)} weights per row, which is row_dim(config)"
        )
    return classes[config.name](config.resolve(), table, fields, dense)


def parameter_groups(config: ModelConfig, model: Model) -> list[dict[str, Any]]:
    """Return groups for a torch optimizer: weight_decay is `embedding_l2` for rows of dense features, else `net_l2`."""
    config = config.resolve()
    dense_rows = [p for name, p in model.named_parameters() if name.endswith("features.numbers")]
    others = [p for name, p in model.named_parameters() if not name.endswith("features.numbers")]
    groups = [(dense_rows, config.embedding_l2), (others, config.net_l2)]
    return [{"params": params, "weight_decay": l2} for params, l2 in groups if params]
