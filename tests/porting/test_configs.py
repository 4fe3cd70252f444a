"""Fields of `EmbeddingConfig` and `EmbeddingBagConfig`, compared with those of TorchRec."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from typing import Any

import pytest
from helpers.embedding_collections import bags, config, features

import thermocline as tc
from thermocline.torchrec import DataType, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType

FIELDS = {
    "num_embeddings": dataclasses.MISSING,
    "embedding_dim": dataclasses.MISSING,
    "name": "",
    "data_type": "FP32",
    "feature_names": [],
    "weight_init_max": None,
    "weight_init_min": None,
    "num_embeddings_post_pruning": None,
    "init_fn": None,
    "need_pos": False,
    "input_dim": None,
    "total_num_buckets": None,
    "use_virtual_table": False,
    "virtual_table_eviction_policy": None,
    "enable_embedding_update": False,
    "stash_weights": False,
}
"""Fields of EmbeddingConfig of TorchRec 1.8, in order, and their defaults. EmbeddingBagConfig has pooling too."""


def fields_of(kind: Any) -> list[tuple[str, Any]]:
    """Return names and defaults of the fields of a config, with the names of enum members."""
    found = []
    for field in dataclasses.fields(kind):
        made = field.default_factory is not dataclasses.MISSING
        value = field.default_factory() if made else field.default  # type: ignore[misc]
        found.append((field.name, getattr(value, "name", value)))
    return found


def test_configs_have_the_fields_of_torchrec() -> None:
    bag_fields = [*FIELDS.items(), ("pooling", "SUM")]
    assert fields_of(EmbeddingConfig) == list(FIELDS.items())
    assert fields_of(EmbeddingBagConfig) == bag_fields
    if importlib.util.find_spec("torchrec") is not None:
        import torchrec

        assert fields_of(torchrec.EmbeddingConfig) == list(FIELDS.items())
        assert fields_of(torchrec.EmbeddingBagConfig) == bag_fields


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_embeddings_post_pruning", 9),
        ("need_pos", True),
        ("input_dim", 4),
        ("total_num_buckets", 2),
        ("use_virtual_table", True),
        ("virtual_table_eviction_policy", object()),
        ("enable_embedding_update", True),
        ("stash_weights", True),
    ],
)
def test_fields_without_an_effect_are_refused(field: str, value: object) -> None:
    message = f"table 't': {field} is {re.escape(repr(value))}: it is not supported; leave it {FIELDS[field]!r}"
    with pytest.raises(ValueError, match=message):
        bags(config(**{field: value}))
    ec = EmbeddingCollection([EmbeddingConfig(50, 4, "t", **{field: FIELDS[field]})], optimizer=tc.SGD())
    assert ec(features())["t"].values().shape[1] == 4


def test_configs_take_torchrecs_positions() -> None:
    given = (50, 4, "t", DataType.BF16, ["a"], 2.0, -2.0, None, None, False, None, None, False, None, False, False)
    table = bags(EmbeddingBagConfig(*given, PoolingType.MEAN)).tables["t"]
    assert table.precision.kind == "bf16"
    assert table.spec.initial == tc.Uniform(scale=2.0)
