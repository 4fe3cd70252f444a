"""A small demo: it runs without a terminal, prints its table, compares all bits and removes its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

from examples import demo


@pytest.fixture(autouse=True)
def _restore_torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_demo(folder: Path, **options: Any) -> None:
    small = {"steps": 12, "keys": 50_000, "batch_size": 128, "mem": "2MB", "ssd_mem": "8MB", "seconds": 60.0}
    demo.main(**{**small, "folder": folder, **options})


def test_the_demo_prints_its_report_and_leaves_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_demo(tmp_path)
    text = " ".join(capsys.readouterr().out.split())
    for word in ("step 12", "saved step", "AUC", "examples/s", "rows from SSD", "DRAM per SSD row", "disk", "checked:"):
        assert word in text
    assert list(tmp_path.iterdir()) == []


def test_a_demo_that_reaches_its_deadline_compares_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_demo(tmp_path, seconds=0.0)
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("finished after 1 step,") == 2
    assert "checked:" in text


def _flip_a_row(memory: demo.Run) -> None:
    keys, rows = next(memory.table.rows())
    memory.table.dram.push(keys[:1], np.nextafter(rows[:1], np.float32(9)))


def _flip_a_weight(memory: demo.Run) -> None:
    with torch.no_grad():
        memory.model.mlp[0].bias[0] += 1


@pytest.mark.parametrize(("damage", "message"), [(_flip_a_row, "1 of"), (_flip_a_weight, "mlp.0.bias")])
def test_a_difference_is_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[demo.Run], None],
    message: str,
) -> None:
    compare = demo.compare

    def damaged(run: demo.Run, memory: demo.Run) -> tuple[int, list[str]]:
        damage(memory)
        return compare(run, memory)

    monkeypatch.setattr(demo, "compare", damaged)
    with pytest.raises(typer.Exit):
        run_demo(tmp_path, steps=3)
    text = " ".join(capsys.readouterr().out.split())
    assert f"differs from the run in memory: {message}" in text
    assert list(tmp_path.iterdir()) == []
