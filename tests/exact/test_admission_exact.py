"""Training with admission gives the bits of a dict of rows with the same rule, whatever tiers, pipeline and saves."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.admission import AdmissionReference, AdmissionReferenceBag
from helpers.ssd import SMALL
from helpers.train import Net, all_keys, bits, budget_for, loss_of, make_batches, one_torch_thread, weights_of

import thermocline as tc
from thermocline.embedding.admission import SHARED_KEY, Otherwise
from thermocline.embedding.reference_backend import ReferenceBackend

DIM = 4
BAGS: list[tuple[Any, Any]] = [([0, 1, 2], ["sum", "mean", "sum"]), ([2, 3], "mean")]
WIDTH = DIM * 5
OPTIMIZER = tc.Adam(lr=0.02)
OTHERWISE: tuple[Otherwise, ...] = ("initial", "zero", "shared")


@functools.cache
def batches(count: int, weighted: bool) -> list[tc.Batch]:
    return make_batches(count, examples=3, fields=4, keys=400, max_ids=3, skew=2.0, weighted=weighted, seed=11)


def admission_of(otherwise: Otherwise) -> tc.Admission:
    return tc.Admission(count=3, otherwise=otherwise, memory="64KB")


@dataclasses.dataclass(frozen=True)
class Options:
    tiers: str = "dram"
    depth: int = 1
    pull_window: int = 1
    lookahead: int = 0

    def __str__(self) -> str:
        return f"{self.tiers}-depth{self.depth}-window{self.pull_window}-ahead{self.lookahead}"


def open_table(options: Options, otherwise: Otherwise, folder: Path, **more: Any) -> tc.Table:
    arguments: dict[str, Any] = {"mem": "1MB"}
    if "ssd" in options.tiers:
        mem = budget_for(150, DIM, OPTIMIZER, lookahead=bool(options.lookahead))
        arguments = {"mem": mem, "ssd": folder / "store", "ssd_options": SMALL, "lookahead": options.lookahead}
    if "hbm" in options.tiers:
        from thermocline.kernels import INTERPRETED
        from thermocline.tiers.hbm import bytes_for

        arguments |= {"hbm": bytes_for(150, 3 * DIM), "device": "interpreter" if INTERPRETED else "cuda"}
    if options.tiers == "reference":
        arguments["make_backend"] = ReferenceBackend.make
    return tc.Table(
        DIM, OPTIMIZER, name="t", seed=5, threads=1, admission=admission_of(otherwise), **{**arguments, **more}
    )


def probe(count: int, weighted: bool) -> Any:
    return np.concatenate([all_keys(batches(count, weighted)), np.array([SHARED_KEY, 1], np.uint64)])


@functools.cache
def expected(otherwise: Otherwise, count: int, weighted: bool) -> tuple[bytes, bytes, int]:
    """Train on dicts: bits of all rows, bits of the network, number of rows."""
    one_torch_thread()
    like = tc.Table(DIM, OPTIMIZER, name="t")
    reference = AdmissionReference(like, admission_of(otherwise), seed=5)
    bags = [AdmissionReferenceBag(reference, fields, pooling) for fields, pooling in BAGS]
    model = Net(bags, WIDTH)
    dense = torch.optim.Adam(model.dense.parameters(), lr=0.01)
    for batch in batches(count, weighted):
        reference.plan(batch, bags)
        loss_of(model, batch).backward()
        reference.step()
        dense.step()
        dense.zero_grad()
    assert 0 < len(reference.admitted) < len(all_keys(batches(count, weighted)))
    return bits(reference.table.read(probe(count, weighted))), weights_of(model), len(reference.table.rows)


def make_model(table: tc.Table) -> Net:
    return Net([tc.EmbeddingBag(table, fields, pooling=pooling) for fields, pooling in BAGS], WIDTH)


def train(model: Net, table: tc.Table, dense: Any, source: Any) -> None:
    for batch in source:
        loss_of(model, batch).backward()
        table.step()
        dense.step()
        dense.zero_grad()


def assert_expected(table: tc.Table, model: Net, otherwise: Otherwise, count: int, weighted: bool) -> None:
    rows, dense, number = expected(otherwise, count, weighted)
    assert bits(table.read(probe(count, weighted))) == rows
    assert weights_of(model) == dense
    stored = [key for keys, _ in table.rows() for key in keys.tolist()]
    assert len(stored) == len(set(stored)) == number, "a key that was not admitted has a row"


def train_and_check(options: Options, otherwise: Otherwise, folder: Path, count: int, weighted: bool) -> None:
    one_torch_thread()
    table = open_table(options, otherwise, folder)
    model = make_model(table)
    dense = torch.optim.Adam(model.dense.parameters(), lr=0.01)
    source = tc.prefetch(batches(count, weighted), table, depth=options.depth, pull_window=options.pull_window)
    train(model, table, dense, source)
    assert_expected(table, model, otherwise, count, weighted)
    table.close()


HOST = [
    *(Options("dram", depth, window) for depth, window in [(1, 1), (3, 2)]),
    *(Options("ssd", depth, window, ahead) for depth, window, ahead in [(4, 2, 0), (1, 1, 5), (3, 2, 9)]),
    Options("reference", 3, 2),
]


@pytest.mark.parametrize("otherwise", OTHERWISE)
@pytest.mark.parametrize("options", HOST, ids=str)
def test_rows_are_those_of_the_rule_in_every_tier(options: Options, otherwise: Otherwise, tmp_path: Path) -> None:
    for weighted in (False, True):
        train_and_check(options, otherwise, tmp_path / str(weighted), 60, weighted)


HBM = [*((Options("hbm", 3, 2), otherwise) for otherwise in OTHERWISE), (Options("hbm-ssd", 3, 1, 6), "initial")]


@pytest.mark.parametrize(("options", "otherwise"), HBM, ids=str)
def test_rows_are_those_of_the_rule_in_hbm(options: Options, otherwise: Otherwise, tmp_path: Path) -> None:
    train_and_check(options, otherwise, tmp_path, 14, True)


@pytest.mark.gpu
@pytest.mark.parametrize("otherwise", OTHERWISE)
@pytest.mark.parametrize("options", [Options("hbm", 4, 1), Options("hbm-ssd", 3, 2, 9)], ids=str)
def test_rows_are_those_of_the_rule_on_a_gpu(options: Options, otherwise: Otherwise, tmp_path: Path) -> None:
    for weighted in (False, True):
        train_and_check(options, otherwise, tmp_path / str(weighted), 60, weighted)


@pytest.mark.parametrize("otherwise", OTHERWISE)
@pytest.mark.parametrize("options", [Options("dram", 4), Options("ssd", 3, 2, 9), Options("reference", 3)], ids=str)
def test_a_run_that_resumes_has_the_bits_of_one_that_did_not_stop(
    options: Options, otherwise: Otherwise, tmp_path: Path
) -> None:
    """Each part of the run saves while later batches are planned, goes on a little, and is given up."""
    one_torch_thread()
    count, done = 60, 0
    for part in itertools.count():
        table = open_table(options, otherwise, tmp_path)
        model = make_model(table)
        dense = torch.optim.Adam(model.dense.parameters(), lr=0.01)
        checkpoints = tc.Checkpoints(tmp_path / "run", [table], model, dense)
        if part:
            saved = checkpoints.restore()
            assert saved is not None
            assert saved.step == done
        steps = [7, 1, 12, 20, 60][part]
        rest = batches(count, True)[done:]
        source = tc.prefetch(rest, table, depth=options.depth, pull_window=options.pull_window)
        for number, batch in enumerate(source, 1):
            loss_of(model, batch).backward()
            table.step()
            dense.step()
            dense.zero_grad()
            if number == steps:
                checkpoints.save(done + number)
            if number == steps + 2:
                break
        source.close()
        if done + steps >= count:
            break
        done += steps
        checkpoints.close()
        table.close()
    assert_expected(table, model, otherwise, count, True)
    table.close()


def train_and_forget(options: Options, otherwise: Otherwise, folder: Path) -> tuple[bytes, bytes]:
    """Train, and count some keys with a row from 0 after three of the steps."""
    one_torch_thread()
    table = open_table(options, otherwise, folder)
    assert table._admission is not None
    table._admission.may_forget = True
    model = make_model(table)
    dense = torch.optim.Adam(model.dense.parameters(), lr=0.01)
    with tc.prefetch(batches(60, True), table, depth=options.depth, pull_window=options.pull_window) as source:
        for step, batch in enumerate(source, 1):
            loss_of(model, batch).backward()
            table.step()
            dense.step()
            dense.zero_grad()
            if step in (20, 25, 41):
                hot = np.array(sorted(int(key) for key in np.unique(batches(60, True)[step].ids))[::2], np.uint64)
                table._admission.forget(hot)
    result = bits(table.read(probe(60, True))), weights_of(model)
    table.dram.check()
    table.close()
    return result


@pytest.mark.parametrize("otherwise", OTHERWISE)
def test_keys_count_from_0_after_their_rows_were_deleted_whatever_was_planned(
    otherwise: Otherwise, tmp_path: Path
) -> None:
    """The batch after the step has every second key: at depth 1 it is planned after the deletion, else before."""
    serial = train_and_forget(Options("dram"), otherwise, tmp_path / "serial")
    assert serial != expected(otherwise, 60, True)[:2]
    for number, options in enumerate([Options("dram", 4), Options("ssd", 3, 2, 9), Options("ssd", 1, 1, 5)]):
        assert train_and_forget(options, otherwise, tmp_path / str(number)) == serial
