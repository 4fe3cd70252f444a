"""`state_dict` of a model with tables: it names the rows it belongs to, and can contain them."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.ssd import SMALL
from helpers.train import Net, all_keys, bits, loss_of, make_batches, weights_of

import thermocline as tc
from thermocline.checkpoint.manager import Checkpoints
from thermocline.kernels import INTERPRETED
from thermocline.tiers.ssd import SsdStore

GPU = "interpreter" if INTERPRETED else "cuda"
BATCHES = make_batches(12)
KEYS = all_keys(BATCHES)


def make(folder: Path | None = None, **options: Any) -> tuple[tc.Table, Net]:
    """A table, in memory or with a store, and a small model on it."""
    if folder is not None:
        options |= {"ssd": folder, "ssd_options": SMALL}
    table = tc.Table(4, **{"optimizer": tc.Adam(lr=0.05), "mem": "1MB", "name": "ads", **options})
    torch.manual_seed(3)
    return table, Net([tc.EmbeddingBag(table, 3)], 12)


def train(table: tc.Table, model: Net, batches: list[tc.Batch]) -> None:
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        loss_of(model, batch).backward()
        table.step()
        dense.step()
        dense.zero_grad()


def result(table: tc.Table, model: Net) -> tuple[bytes, bytes, int, float]:
    return bits(table.read(KEYS)), weights_of(model), table.step_count, table.lr


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


# ---- without rows


def test_state_dict_loads_on_its_commit_and_restores_the_step(tmp_path: Path) -> None:
    table, model = make(tmp_path / "rows")
    train(table, model, BATCHES[:3])
    epoch = table.commit(b"note")
    assert table.note == b"note"
    state = saved_and_loaded(model.state_dict())
    train(table, model, BATCHES[3:5])
    table.commit()
    expected = result(table, model)
    table.close()

    table, model = make(tmp_path / "rows")
    message = (
        rf"rows of table 'ads' at step 3, commit 1 of {tmp_path / 'rows'}, but the table is at step 5: "
        r"call table\.reopen\(epoch=1\)"
    )
    with pytest.raises(tc.FormatError, match=message):
        model.load_state_dict(state)
    table.reopen(epoch=epoch)
    assert table.step_count == 3  # Adam's bias correction depends on it
    model.load_state_dict(state)
    train(table, model, BATCHES[3:5])
    assert result(table, model) == expected
    table.close()
    table, model = make(tmp_path / "rows", epoch=epoch)
    model.load_state_dict(state)
    table.close()


def test_state_dict_taken_before_the_commit_of_its_step_loads_after_it(tmp_path: Path) -> None:
    table, model = make(tmp_path / "rows")
    train(table, model, BATCHES[:2])
    state = model.state_dict()
    table.commit()
    table.close()
    table, model = make(tmp_path / "rows")
    model.load_state_dict(state)
    table.close()


def test_state_dict_of_training_on_a_frozen_table_loads_on_the_same_commit(tmp_path: Path) -> None:
    table, model = make(tmp_path / "rows")
    train(table, model, BATCHES[:2])
    table.commit()
    table.close()
    table, model = make(tmp_path / "rows")
    table.requires_grad_(False)
    train(table, model, BATCHES[2:4])  # the dense layers; `table.step()` changes nothing
    state = model.state_dict()
    table.close()
    table, model = make(tmp_path / "rows")
    model.load_state_dict(state)
    table.close()


def test_state_dict_on_other_rows_raises(tmp_path: Path) -> None:
    table, model = make()
    fresh = model.state_dict()
    train(table, model, BATCHES[:2])
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    with pytest.raises(tc.FormatError, match="untrained, but the table is at step 2: open a new table"):
        model.load_state_dict(fresh)
    train(table, model, BATCHES[2:3])
    with pytest.raises(tc.FormatError, match="at step 2, but the table is at step 3: its rows had not been committed"):
        model.load_state_dict(state)  # as in early stopping: only the dense part would go back

    other_table, other = make()
    other.load_state_dict(fresh)
    with pytest.raises(tc.FormatError, match=r"at step 2, but the table is untrained: .* tc\.state_dict"):
        other.load_state_dict(state)
    train(other_table, other, BATCHES[5:7])
    with pytest.raises(tc.FormatError, match="is at step 2 of another training"):
        other.load_state_dict(state)

    committed_table, committed = make(tmp_path / "rows")
    train(committed_table, committed, BATCHES[:1])
    committed_table.commit()
    for folder in (tmp_path / "elsewhere", None):
        elsewhere, model = make(folder)
        with pytest.raises(tc.FormatError, match=f"open it with ssd='{tmp_path / 'rows'}', epoch=1"):
            model.load_state_dict(committed.state_dict())
        elsewhere.close()
    committed_table.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "b"}, "is of table 'ads', but this one is 'b': make it with name='ads'"),
        ({"seed": 9}, "with seed 0, but this one has 9"),
        ({"optimizer": tc.SGD(lr=0.05)}, "with optimizer .*Adam.*, but this one has .*SGD"),
        ({"precision": "fp16"}, "with precision .*fp32.*, but this one has .*fp16"),
    ],
)
def test_state_dict_of_another_table_raises(options: dict[str, Any], message: str) -> None:
    _, model = make()
    _, other = make(**options)
    with pytest.raises(tc.FormatError, match=message):
        other.load_state_dict(model.state_dict())
    with pytest.raises(
        tc.FormatError, match=r"\['b'\], but it has those of \['ads'\]" if "name" in options else message
    ):
        tc.load_state_dict(other, tc.state_dict(model, rows=True))


def test_state_dict_without_description_says_what_is_missing() -> None:
    table, model = make()
    state = {name: value for name, value in model.state_dict().items() if "_extra_state" not in name}
    with pytest.raises(RuntimeError, match=r"Missing.* \"bags\.0\._extra_state: .* has no rows .*strict=False"):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == ["bags.0._extra_state"]
    assert table.step_count == 0


def test_damaged_description_raises() -> None:
    _, model = make()
    texts = (torch.tensor(list(text)).byte() for text in (b'{"format": 9}', b'{"format": 1}', b"[1]", b"7"))
    for state in (torch.zeros(7), torch.zeros(7, dtype=torch.uint8), None, *texts):
        with pytest.raises(tc.FormatError, match=r"_extra_state\) cannot be read: it"):
            model.load_state_dict({**model.state_dict(), "bags.0._extra_state": state})


def test_history_of_a_run_is_restored(tmp_path: Path) -> None:
    """A state_dict beside a checkpoint loads after the checkpoint was restored, in another process, and not before."""
    table, model = make()
    checkpoints = Checkpoints(tmp_path, [table], model)
    train(table, model, BATCHES[:3])
    checkpoints.save(3)
    state = saved_and_loaded(model.state_dict())
    checkpoints.close()
    table.close()

    table, model = make()
    checkpoints = Checkpoints(tmp_path, [table], model)
    with pytest.raises(tc.FormatError, match=r"restore the rows first, with tc\.Checkpoints"):
        model.load_state_dict(state)
    checkpoints.restore()
    model.load_state_dict(state)
    checkpoints.close()
    table.close()


def test_copies_share_the_table_only_on_request() -> None:
    table, model = make()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="table 'ads' cannot be copied or pickled"):
            copied(model)
    twin = copy.deepcopy(model, {id(table): table})
    assert twin.bags[0].table is table
    expected = bits(model.eval()(BATCHES[0]))
    del model
    assert bits(twin.eval()(BATCHES[0])) == expected
    twin.train()
    train(table, twin, BATCHES[:1])  # the copy is registered with the table


# ---- with rows


KINDS: dict[str, dict[str, Any]] = {
    "adam": {},
    "sgd": {"optimizer": tc.SGD(lr=0.05)},
    "int8": {"precision": "int8"},
    "learned": {"precision": tc.Precision("int4", range=0.5, scale_lr=0.01)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_restored_bit_for_bit_into_any_tiers(kind: str, tmp_path: Path) -> None:
    options = KINDS[kind]
    table, model = make(**options)
    train(table, model, BATCHES[:5])
    table.lr = 0.04
    state = saved_and_loaded(tc.state_dict(model, rows=True))
    safetensors.torch.save(state)  # tensors only
    saved = result(table, model)
    train(table, model, BATCHES[5:7])
    expected = result(table, model)

    in_memory = make(**options)
    on_ssd = make(tmp_path / "rows", **{"mem": 24576, **options})
    targets = [in_memory, on_ssd, (table, model)]
    if kind == "learned":  # the interpreter of Triton is slow
        targets.append(make(tmp_path / "gpu", hbm="1MB", device=GPU, **options))
    for target, other in targets:
        train(target, other, BATCHES[7:8])  # replaced: none of its rows remains
        if target.store is not None:
            target.commit()
        tc.load_state_dict(other, state)
        assert result(target, other) == saved
        assert sorted(int(key) for keys, _ in target.rows() for key in keys) == sorted(
            int(key) % 2**64 for key in state["tables/ads/keys"]
        )
        if target.hbm is None or INTERPRETED:  # a GPU's sums have other bits
            train(target, other, BATCHES[5:7])
            assert result(target, other) == expected
        target.close()


def test_untrained_table_is_saved_and_loaded() -> None:
    (table, model), (target, other) = make(precision="int8"), make(precision="int8")
    train(target, other, BATCHES[:2])
    tc.load_state_dict(other, saved_and_loaded(tc.state_dict(model, rows=True)))
    assert result(target, other) == result(table, model)
    assert next(target.rows(), None) is None


def test_loaded_rows_are_saved_by_checkpoints_and_commits(tmp_path: Path) -> None:
    table, model = make()
    train(table, model, BATCHES[:2])
    state = tc.state_dict(model, rows=True)
    expected = result(table, model)
    for folder in (None, tmp_path / "rows"):
        target, other = make(folder)
        checkpoints = Checkpoints(tmp_path / f"run-{folder is None}", [target], other)
        train(target, other, BATCHES[6:])
        checkpoints.save(6)
        tc.load_state_dict(other, state)
        checkpoints.save(7)
        checkpoints.restore()
        assert result(target, other) == expected
        assert sum(len(keys) for keys, _ in target.rows()) == len(state["tables/ads/keys"])
        checkpoints.close()
        target.close()


def test_no_row_of_before_is_written_while_the_rows_of_a_store_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, model = make()
    train(source, model, BATCHES[:2])
    state = tc.state_dict(model, rows=True)
    table, other = make(tmp_path / "rows")
    train(table, other, BATCHES[:1])
    table.commit()
    train(table, other, BATCHES[6:])
    delete = SsdStore.delete
    written: list[int] = []

    def delete_beside_a_pass(store: SsdStore, keys: Any) -> None:
        delete(store, keys)
        written.append(table.backend.host.dram.write_ahead(1 << 20))  # as the background thread of the table's tier

    monkeypatch.setattr(SsdStore, "delete", delete_beside_a_pass)
    before = table.backend.host.dram
    tc.load_state_dict(other, state)
    assert written
    assert not any(written)
    assert table.backend.host.dram is not before
    assert sorted(int(key) for keys, _ in table.rows() for key in keys) == sorted(
        int(key) % 2**64 for key in state["tables/ads/keys"]
    )
    table.close()


def test_failed_load_changes_nothing(tmp_path: Path) -> None:
    table, model = make()
    train(table, model, make_batches(40, keys=100_000))
    state = tc.state_dict(model, rows=True)
    small_table, small = make(mem=16384)
    train(small_table, small, BATCHES[:1])
    before = result(small_table, small)
    with pytest.raises(tc.BudgetError):
        tc.load_state_dict(small, state)
    assert result(small_table, small) == before
    with pytest.raises(tc.FormatError, match=r"must have the rows of tables \['ads'\], but it has none: save with"):
        tc.load_state_dict(small, small.state_dict())
    with pytest.raises(tc.FormatError, match=r"lacks \['state'\] of table 'ads'"):
        tc.load_state_dict(small, {name: value for name, value in state.items() if name != "tables/ads/state"})
    with pytest.raises(tc.FormatError, match="damaged: they have the wrong shape"):
        tc.load_state_dict(small, {**state, "tables/ads/weights": state["tables/ads/weights"][:, :3]})
    assert result(small_table, small) == before


def test_large_tables_are_refused() -> None:
    table, model = make()
    train(table, model, BATCHES[:2])
    count = len(all_keys(BATCHES[:2]))
    with pytest.raises(tc.BudgetError, match=r"table 'ads' take more than the 1 KB left of max_bytes: raise"):
        tc.state_dict(model, rows=True, max_bytes=1000)
    assert len(tc.state_dict(model, rows=True, max_bytes=count * 56)["tables/ads/keys"]) == count
    loss_of(model, BATCHES[0]).backward()
    with pytest.raises(tc.ThermoclineError, match="unapplied gradients: save between steps"):
        tc.state_dict(model, rows=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_and_loads_model_and_tables(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp  # imports Triton, which other tests must import after our kernels

    table, model = make()
    train(table, model, BATCHES[:4])
    dcp.save({"app": tc.ModelState(model)}, checkpoint_id=tmp_path, no_dist=True)
    expected = result(table, model)
    target, other = make(tmp_path / "rows")
    dcp.load({"app": tc.ModelState(other)}, checkpoint_id=tmp_path, no_dist=True)
    assert result(target, other) == expected
    target.close()
    with pytest.raises(tc.BudgetError, match="max_bytes"):
        dcp.save({"app": tc.ModelState(model, max_bytes=100)}, checkpoint_id=tmp_path / "b", no_dist=True)
