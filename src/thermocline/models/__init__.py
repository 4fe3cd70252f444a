"""The standard CTR models over one interface: `build(config, table, fields, dense)` is Batch -> logits[examples].

Sizes and regularisation default to the BARS x1 settings, dense weights are initialised as FuxiCTR's are, from torch's
seed. Beside the model a run needs, of the same config: a table of `row_dim(config)` floats whose optimizer has
`weight_decay=config.resolve().embedding_l2` and whose rows begin as `tc.Normal(scale=config.initial)`; and a dense
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
    """A model of `fields` fields of keys and `dense` dense features. Its weights are drawn from torch's seed."""
    from thermocline.models import cross, deep, interact, linear  # here, for they load torch

    kinds: dict[str, type[Model]] = {
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
        raise ValueError(f"{config.name} over {fields} fields: at least one field of keys is needed beside dense ones")
    if table.dim != row_dim(config):
        raise ValueError(
            f"table {table.name!r} has rows of {table.dim} weights: {config.name} of dim {config.dim} "
            f"needs {row_dim(config)}, which is row_dim(config)"
        )
    return kinds[config.name](config.resolve(), table, fields, dense)


def parameter_groups(config: ModelConfig, model: Model) -> list[dict[str, Any]]:
    """For a torch optimizer: L2 as its weight_decay, `embedding_l2` on the dense features' vectors, else `net_l2`."""
    config = config.resolve()
    vectors = [p for name, p in model.named_parameters() if name.endswith("features.numbers")]
    others = [p for name, p in model.named_parameters() if not name.endswith("features.numbers")]
    groups = [(vectors, config.embedding_l2), (others, config.net_l2)]
    return [{"params": params, "weight_decay": l2} for params, l2 in groups if params]
