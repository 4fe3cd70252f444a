"""`tc.Collate`: batches made in the workers of a DataLoader have the ids of the readers."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import thermocline as tc

EXAMPLES = [
    {"user": "u1", "tags": ["a", "b"], "age": 31, "click": 1},
    {"user": None, "tags": [], "age": 2.5, "click": 0},
    {"user": 7, "tags": ("c",), "age": 0, "click": True},
]


def test_batch_of_examples() -> None:
    collate = pickle.loads(pickle.dumps(tc.Collate(["user", "tags"], dense=["age"], label="click")))
    batch = collate(EXAMPLES)
    wanted = [("user", "u1"), ("tags", "a"), ("tags", "b"), ("user", None), ("user", 7), ("tags", "c")]
    assert batch.ids.tolist() == [tc.key_of(*pair) for pair in wanted]
    assert batch.offsets.tolist() == [0, 1, 3, 4, 4, 5, 6]
    assert batch.names == ("user", "tags")
    assert torch.equal(batch.dense, torch.tensor([[31.0], [2.5], [0.0]]))
    assert batch.label.tolist() == [1, 0, 1]


def test_data_loader_workers_give_batches_to_a_training_loop() -> None:
    examples = [{"user": i % 50, "click": i % 2} for i in range(64)]
    collate = tc.Collate(["user"], label="click", raw_keys=True)
    loader: Any = torch.utils.data.DataLoader(examples, batch_size=16, num_workers=1, collate_fn=collate)  # type: ignore[arg-type]
    table = tc.Table(2, tc.SGD(lr=0.1), mem="1MB")
    bag, seen = tc.EmbeddingBag(table, ["user"]), []
    for batch in tc.prefetch(loader, table):
        bag(batch).sum().backward()
        table.step()
        seen.extend(batch.ids.tolist())
    assert seen == [i % 50 for i in range(64)]
    assert table.step_count == 4


def test_mistakes_are_refused() -> None:
    with pytest.raises(KeyError, match=r"an example has no 'age': it has \['user'\]"):
        tc.Collate(["user"], dense=["age"])([{"user": 1}])
    with pytest.raises(ValueError, match="'user' is 'x': with raw_keys values must be whole numbers"):
        tc.Collate(["user"], raw_keys=True)([{"user": "x"}])
    with pytest.raises(ValueError, match=r"'user' is 1\.7: with raw_keys values must be whole numbers"):
        tc.Collate(["user"], raw_keys=True)([{"user": 1.7}])
    assert tc.Collate(["user"], raw_keys=True)([{"user": ["12", 3.0]}]).ids.tolist() == [12, 3]
    with pytest.raises(ValueError, match="fields are empty"):
        tc.Collate([])
    assert tc.Collate(["user"], raw_keys=True)([{"user": np.uint64(2**64 - 1)}]).ids.tolist() == [2**64 - 1]
