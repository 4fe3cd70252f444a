"""benchmarks/plan.py: trainings with SSD read from it, and are measured after DRAM has been filled."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("plan")


def test_rows_of_trainings_with_ssd_exceed_memory(plan: Any) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        drawn = [plan.draw_training(rng, kind) for kind in plan.KINDS]
        with_ssd = [training for training in drawn if training.share < 1]
        assert len(with_ssd) == 2
        for training in with_ssd:
            assert 0.05 < plan.mem_rows(training) / training.keys < 0.7


def test_warm_steps_follow_the_rows_that_fit(plan: Any) -> None:
    class Keys:
        """Every example has ten keys that no other one has."""

        def unique_keys(self, examples: float) -> float:
            return 10 * examples

    training = plan.draw_training(random.Random(0), "memory + SSD")
    rows = 10.0 * training.batch
    assert plan.steps_to_fill(training, Keys(), 40 * rows, 1000) == 40
    assert plan.steps_to_fill(training, Keys(), 40 * rows, 7) == 7
