"""A damaged page that a merge finds: training stops with the repair command, or goes on exactly if told to."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.run import Ads, World, differing
from rich.console import Console

import thermocline as tc
from thermocline.cli.inspect import inspect
from thermocline.training.display import Display
from thermocline.training.rank_coordinator import DAMAGE, STOP, RankCoordinator
from thermocline.training.trainer import TrainConfig, Trainer

TRAIN = Ads(7)
LOST = np.arange(10**6, 10**6 + 4000, dtype=np.uint64)
"""Keys that training does not use. One of their pages is damaged."""
SMALL = {
    "background_merge": False,
    "segment_bytes": 64 << 10,
    "partition_bytes": 32 << 10,
    "min_log_bytes": 1 << 10,
    "max_log_ratio": 0.02,
    "write_buffer": 4 << 10,
}


def open_world(folder: Path, *, damaged: bool = True, **options: Any) -> tuple[World, str]:
    """Open tables, the first on a store with the rows of LOST; return them and the name of the damaged file."""
    world = World(folder, ssd_options=SMALL, **options)
    store = world.tables[0].store
    assert store is not None
    store.put(LOST, np.zeros((len(LOST), store.row_bytes), np.uint8))
    store.merge()
    victim = sorted((folder / "ssd-a").glob("base-*.tc"))[1]
    if damaged:
        with open(victim, "r+b") as file:
            file.seek(4096 + 100)
            file.write(b"damage")
            os.fsync(file.fileno())
    return world, victim.name


def trainer_of(world: World, path: Path, *callbacks: Any, **config: Any) -> Trainer:
    settings = {"display": False, "tensorboard": False, "checkpoint_minutes": None, "checkpoint_every": 1}
    settings |= {"log_every": 1, "epochs": 2, **config}
    return Trainer(
        world.model, world.optimizer, run_dir=path / "run", config=TrainConfig(**settings), callbacks=callbacks
    )


def test_training_stops_and_names_file_page_and_command(tmp_path: Path) -> None:
    world, victim = open_world(tmp_path)
    trainer = trainer_of(world, tmp_path)
    folder = tmp_path / "ssd-a"
    expected = rf"stopped at step \d+, saved: .*{victim}: page 1.*thermocline repair {folder}.*continue"
    with (
        pytest.warns(RuntimeWarning, match=f"{victim}.*thermocline repair") as warned,
        pytest.raises(tc.CorruptionError, match=expected) as raised,
    ):
        trainer.fit(TRAIN)
    assert len([w for w in warned if "repair" in str(w.message)]) == 1
    assert "\n" not in str(raised.value)
    step = trainer.progress.step
    assert 0 < step < 14
    assert "damaged" in trainer.ending
    assert world.tables[0].damage
    assert not world.tables[1].damage
    assert trainer._saves.checkpoints is not None
    assert trainer._saves.checkpoints.saved()[-1].step == step  # the step boundary is saved
    world.close()
    problems = inspect(tmp_path / "run")["problems"] + inspect(folder)["problems"]
    assert any(victim in problem for problem in problems)


@pytest.mark.filterwarnings("ignore:.*repair:RuntimeWarning")
def test_going_on_is_exact_and_damage_is_shown(tmp_path: Path) -> None:
    for name in ("damaged", "whole"):
        (tmp_path / name).mkdir()
    world, victim = open_world(tmp_path / "damaged", on_damage="continue")
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    trainer = trainer_of(world, tmp_path / "damaged", Display(console))
    assert trainer.fit(TRAIN).progress.step == 14
    store = world.tables[0].store
    assert store is not None
    stats = store.stats()
    assert stats.damaged_partitions == 1
    assert stats.partitions > 3
    assert stats.merges > 3
    with pytest.raises(tc.CorruptionError, match=rf"{victim}.*page 1"):
        world.tables[0].read(LOST)
    bits = world.bits()
    world.close()
    rows = [json.loads(line) for line in (tmp_path / "damaged/run/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["event"] == "train"
    last = [row for row in rows if row["event"] == "train"][-1]
    assert victim in last["damage"]["a"]
    assert last["damaged_partitions"] == 1
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count(f"table 'a' is damaged: {tmp_path}") == 1
    assert "DAMAGED: 1 partition set aside" in text

    whole, _ = open_world(tmp_path / "whole", damaged=False)
    trainer_of(whole, tmp_path / "whole").fit(TRAIN)
    assert not whole.tables[0].damage
    assert differing(bits, whole.bits()) == []
    whole.close()
    last = json.loads((tmp_path / "whole/run/metrics.jsonl").read_text().splitlines()[0])
    assert (last["damage"], last["damaged_partitions"]) == ({}, 0)


@pytest.mark.filterwarnings("ignore:.*repair:RuntimeWarning")
def test_own_loops_stop_at_a_batch_or_a_commit(tmp_path: Path) -> None:
    world, victim = open_world(tmp_path)
    table = world.tables[0]

    def train_and_commit() -> None:
        for n in range(7):
            world.train([TRAIN.batch(n)])
            table.commit()

    with pytest.raises(tc.CorruptionError, match=rf"table 'a': .*{victim}.*thermocline repair.*on_damage"):
        train_and_commit()
    assert table.store is not None
    epoch = table.store.epoch
    with pytest.raises(tc.CorruptionError, match=victim):
        world.train(TRAIN)
    with pytest.raises(tc.CorruptionError, match=victim):
        table.commit()
    assert table.store.epoch == epoch + 1  # the rows are durable
    world.close()
    with pytest.raises(ValueError, match="on_damage is 'ignore': it must be stop or continue"):
        tc.Table(4, tc.SGD(lr=0.1), on_damage="ignore")  # type: ignore[arg-type]


def test_damage_of_one_rank_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = object.__new__(RankCoordinator)
    ranks.world, ranks.is_rank0, ranks._sent, ranks._requests = 2, False, 0, 0
    assert ranks.local_flags(False, False, False, True) == DAMAGE
    assert not ranks.requested(DAMAGE, True)  # not before all ranks have the flag
    ranks.merge_flags(DAMAGE)
    assert ranks.requested(DAMAGE, False)
    assert not ranks.requested(STOP, False)
