"""Collections of `thermocline.torchrec` in an existing `tc.Tiers`: `tiers=`."""

from __future__ import annotations

import copy
import functools
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.embedding_collections import bags, config, features, fill
from helpers.ssd import SMALL

import thermocline as tc
from thermocline.embedding.member_table import MemberTable
from thermocline.torchrec import EmbeddingCollection, EmbeddingConfig
from thermocline.training.trainer import tables_of


def test_collections_and_tables_share_one_budget(tmp_path: Path) -> None:
    tiers = tc.Tiers(mem="4MB", ssd=tmp_path, table_options={"ssd_options": SMALL})
    adam = tc.Adam(lr=0.1)
    ebc = bags(config("t"), optimizer=adam, tiers=tiers)
    ec = EmbeddingCollection(
        [EmbeddingConfig(50, 4, "s", init_fn=functools.partial(fill, 0.5))], optimizer=adam, tiers=tiers
    )
    bag = tc.EmbeddingBag(tiers.table("own", 4, adam), ["t"])
    alone = bags(config("t"), optimizer=adam)
    assert (tiers["own"].read([1])[0, :4] != 0).any()  # the first use declares and fills the others
    assert (tiers["s"].read_rows([1])[0] == 0.5).all()
    assert sum(table.spec.mem for table in tiers.row_tables) <= 4_000_000
    for seed in range(3):
        kjt = features("t", "s", seed=seed)
        both = ebc(kjt).values().sum() + ec(kjt)["s"].values().sum()
        (both + bag(alone.batch_of(kjt)).sum()).backward()
        tiers.step()
        alone(kjt).values().sum().backward()
    assert [table.step_count for table in tiers.tables.values()] == [3, 3, 3]
    ids = np.arange(50)
    assert np.array_equal(ebc.tables["t"].read(ids), alone.tables["t"].read(ids))
    assert len(tc.RowOptimizer(tiers).tables) == 1
    with pytest.raises(ValueError, match=r"both tiers and mem, table_options are given"):
        bags(tiers=tiers, mem="1MB", table_options={})
    with pytest.raises(tc.ThermoclineError, match=r"divided at the first use of 'own': make the module before"):
        bags(config("late"), tiers=tiers)
    with pytest.raises(ValueError, match=r"RowOptimizer\(\) has no tables: backward updates"):
        tc.RowOptimizer(*alone.tables.values())
    with pytest.raises(ValueError, match=r"collection of thermocline\.torchrec, whose rows backward updates"):
        tables_of(alone)


def test_a_shared_budget_waits_for_every_optimizer() -> None:
    tiers = tc.Tiers(mem="4MB")
    ready, other = bags(config("a"), tiers=tiers), bags(config("b"), optimizer=None, tiers=tiers)
    with pytest.raises(RuntimeError, match=r"table 'b' has no optimizer"):
        ready(features("a"))
    with pytest.raises(TypeError, match=r"a collection with tiers=\.\.\. cannot be copied"):
        copy.deepcopy(other)
    del other
    gc.collect()
    assert ready(features("a")).values().shape == (3, 4)


def test_new_tables_leave_a_folder_openable_in_any_order(tmp_path: Path) -> None:
    def opened(*declared: str) -> dict[str, float]:
        tiers = tc.Tiers(mem="8MB", ssd=tmp_path / "rows", table_options={"ssd_options": SMALL})
        made = [
            bags(*map(config, names), tiers=tiers) if names.isupper() else tiers.table(names, 4, tc.SGD(lr=0.5))
            for names in declared
        ]
        assert len(tiers.row_tables) == len(made)
        if declared == ("A",):
            tiers["A"].load_rows([1], torch.full((1, 4), 7.0))
        tiers.commit()
        values = {name: float(table.read_rows([1])[0][0, 0]) for name, table in tiers.tables.items()}
        tiers.close()
        return values

    opened("A")
    assert opened("x", "A")["A"] == 7  # before: FormatError, as x had the storage of A
    assert opened("B", "AC", "y", "x")["A"] == 7
    assert opened("z", "y")  # the tables of modules are not declared
    for order in (("A", "B", "x", "y", "z"), ("z", "y", "x", "B", "AC"), ("AC", "new", "B")):
        assert opened(*order)["A"] == 7


def test_initial_rows_are_loaded_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = tc.Tiers(mem="4MB", ssd=tmp_path, table_options={"ssd_options": SMALL})
    made = [bags(config(n, init_fn=functools.partial(fill, i)), tiers=tiers) for i, n in enumerate("abc", 1)]
    load, loaded = MemberTable.load_rows, []

    def load_first_half(self: MemberTable, ids: Any, rows: Any) -> None:
        loaded.append(self.name)
        load(self, ids[:25], rows[:25])
        self.commit()
        raise OSError("disk is full")

    monkeypatch.setattr(MemberTable, "load_rows", load_first_half)
    for use in (lambda: made[1](features("b")), lambda: tiers["c"].read([1]), tiers.commit):
        with pytest.raises(OSError, match="disk is full"):
            use()
    assert loaded == ["a", "a", "a"]
    monkeypatch.undo()
    assert [np.unique(tiers[name].read_rows(np.arange(50))[0]).tolist() for name in "abc"] == [[1], [2], [3]]
    tiers["a"].load_rows([1], np.zeros((1, 4), np.float32))
    assert len(tiers.row_tables) == 3
    assert not tiers["a"].read_rows([1])[0].any()  # they are loaded once


@pytest.mark.timeout(60)
def test_an_init_fn_cannot_use_tables_of_its_budget() -> None:
    tiers = tc.Tiers(mem="4MB")
    other = tiers.table("other", 4, tc.SGD(lr=0.5))
    ebc = bags(config("t", init_fn=lambda weights: weights.copy_(torch.from_numpy(other.read(range(50))))), tiers=tiers)
    for use in (lambda: ebc(features()), lambda: other.read([1])):
        with pytest.raises(tc.ThermoclineError, match=r"used while all tables .* opened: an init_fn must not use them"):
            use()
