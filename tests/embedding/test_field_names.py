"""Names of fields: a bag reads columns by name, and other names or another order are errors, never wrong columns."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thermocline as tc
from thermocline.checkpoint.manager import Checkpoints
from thermocline.embedding.batch_plan import BagSpec, required_fields

LABEL = torch.tensor([1.0, 0.0])


def jagged(keys: list[str]) -> tc.Batch:
    """Two examples of the fields user, item and tags, given in the order of `keys`."""
    values = {"user": [1, 2], "item": [11, 12], "tags": [21, 22, 23]}
    lengths = {"user": [1, 1], "item": [1, 1], "tags": [2, 1]}
    ids = np.array([value for key in keys for value in values[key]], np.uint64)
    return tc.Batch.from_jagged(keys, ids, [n for key in keys for n in lengths[key]], label=LABEL)


def make_table() -> tc.Table:
    return tc.Table(2, tc.SGD(lr=0.5), mem="1MB", initial=tc.Normal(scale=1.0))


def train(table: tc.Table, bag: torch.nn.Module, batches: Any) -> None:
    for batch in batches:
        vectors = bag(batch).flatten(1)
        (vectors * torch.arange(1.0, 1 + vectors.shape[1])).sum().backward()
        table.step()


# ---- batches


def test_batches_have_names() -> None:
    batch = jagged(["user", "item", "tags"])
    assert batch.names == ("user", "item", "tags")
    assert copy.copy(batch).names is batch.names
    assert tc.Batch.from_lists([[1, 2]]).names is None
    assert tc.Batch.from_lists([[1, [2]]], names=["a", "b"]).names == ("a", "b")
    for names, error in (
        (["a"], "1 names for 2 fields, 'a': give one name per field"),
        (["a", "a"], "names have 'a' twice"),
        (["a", 3], "names of fields must be text"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            tc.Batch.from_lists([[1, 2]], names=names)


def test_select_by_name() -> None:
    batch, other = jagged(["user", "item", "tags"]), jagged(["tags", "user", "item"])
    ids, offsets, _ = other.select(["item", "tags"])
    assert ids.tolist() == [11, 21, 22, 12, 23]
    assert offsets.tolist() == [0, 1, 3, 4, 5]
    assert batch.select(["item", "tags"])[0].tolist() == ids.tolist()
    assert batch.select([1, 2])[0].tolist() == ids.tolist()


def test_hashing_keeps_names_of_fields_only() -> None:
    batch = jagged(["user", "item", "tags"])
    assert tc.hashing.Modulo(8, fields="per_field")(batch).names == batch.names
    assert tc.hashing.Modulo(8, fields="per_example")(batch).names is None


def test_reader_gives_the_names_of_columns(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("user,label,item\nx,1,y\nz,0,y\n")
    names = {id(batch.names): batch.names for batch in tc.Reader(file, batch_size=1)}
    assert list(names.values()) == [("user", "item")]  # one tuple for all batches


# ---- bags


@pytest.mark.parametrize("pipeline", [False, True])
def test_named_bag_reads_any_order(pipeline: bool) -> None:
    orders = [["user", "item", "tags"], ["tags", "item", "user"], ["item", "tags", "user"]]
    results = []
    for fields, batches in (
        ([0, 2], [jagged(orders[0])] * 3),
        (["user", "tags"], [jagged(order) for order in orders]),
    ):
        table = make_table()
        bag = tc.EmbeddingBag(table, fields, pooling=["sum", "mean"])
        with tc.prefetch(batches, table, depth=2) as ready:
            train(table, bag, ready if pipeline else batches)
        results.append(table.read(np.arange(30, dtype=np.uint64)).tobytes())
    assert results[0] == results[1]


def test_named_and_numbered_bags_share_a_table() -> None:
    table = make_table()
    bags = tc.EmbeddingBag(table, ["item"]), tc.EmbeddingBag(table, [0])
    batch = jagged(["user", "item", "tags"])
    expected = table.read(np.array([11, 12, 1, 2], np.uint64)).reshape(2, 2, 1, 2)
    assert np.array_equal(np.stack([bag(batch).detach().numpy() for bag in bags]), expected)


def test_other_names_raise_with_both() -> None:
    table = make_table()
    bag = tc.EmbeddingBag(table, ["user", "shop"])
    with pytest.raises(ValueError, match="'user', 'shop', but the batch has 'user', 'item', 'tags': 'shop' missing"):
        bag(jagged(["user", "item", "tags"]))
    with pytest.raises(ValueError, match="'user', 'shop', but the batch has no field names: make it with names="):
        bag(tc.Batch.from_lists([[1, 2]]))
    with pytest.raises(TypeError, match="only names or only numbers"):
        tc.EmbeddingBag(table, ["user", 1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"fields is 'user': .* such as \['user'\]"):
        tc.EmbeddingBag(table, "user")


def test_numbered_bag_refuses_another_order() -> None:
    """Without names the bag reads positions: names that move are an error instead of wrong columns."""
    table = make_table()
    bag = tc.EmbeddingBag(table, 2)
    train(table, bag, [tc.Batch.from_lists([[1, 11, 21], [2, 12, 23]])] * 2)  # unnamed batches are as before
    assert bag.field_names is None
    train(table, bag, [jagged(["user", "item", "tags"])])
    assert bag.field_names == ("user", "item")
    with pytest.raises(ValueError, match=r"\[0, 1\] by number: they are \['item', 'user'\] .* were \['user', 'item'\]"):
        bag(jagged(["item", "user", "tags"]))
    bag(tc.Batch.from_lists([[1, 11, 21]]))


def test_required_fields() -> None:
    named, numbered = BagSpec(("b", "a"), "sum", (0, 1)), BagSpec((0, 3), "sum", (0, 1))
    assert required_fields([]) == (1, None)
    assert required_fields([numbered]) == (4, None)
    assert required_fields([named]) == (2, ("b", "a"))
    count, names = required_fields([named, numbered])
    assert names is not None
    assert (count, names[:2], len(set(names))) == (4, ("b", "a"), 4)


# ---- saved names


def test_state_dict_and_checkpoint_record_names(tmp_path: Path) -> None:
    """Declared names are compared when a run is restored; a numbered bag takes the saved ones for its next batches."""
    for number, fields in enumerate((["user", "item"], 2)):
        folder = tmp_path / str(number)
        table = make_table()
        bag = tc.EmbeddingBag(table, fields)  # type: ignore[arg-type]
        checkpoints = Checkpoints(folder, [table], bag)
        train(table, bag, [jagged(["user", "item", "tags"])])
        checkpoints.save(1)
        state = tc.state_dict(bag, rows=True)
        checkpoints.close()

        message = r"bag on table 'table' reads fields \['user', 'item'\], but this one reads \['item', 'user'\]"
        table = make_table()
        swapped = tc.EmbeddingBag(table, ["item", "user"])
        checkpoints = Checkpoints(folder, [table], swapped)
        with pytest.raises(tc.FormatError, match=message):
            checkpoints.restore()
        assert table.step_count == 0
        checkpoints.close()
        with pytest.raises(tc.FormatError, match=message):
            tc.load_state_dict(tc.EmbeddingBag(make_table(), ["item", "user"]), state)

        table = make_table()
        resumed = tc.EmbeddingBag(table, 2)
        checkpoints = Checkpoints(folder, [table], resumed)
        checkpoints.restore()
        checkpoints.close()
        with pytest.raises(ValueError, match=r"they are \['item', 'user'\] in this batch, but were \['user', 'item'\]"):
            resumed(jagged(["item", "user", "tags"]))
