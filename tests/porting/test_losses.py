"""`thermocline.torchrec` has the losses of the original: torchrec where it is installed, and torch's modules."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from helpers.train import one_torch_thread

from benchmarks.torchrec_losses import BOUNDS, CASES, OPTIMIZERS, Case, largest_difference

needs_torchrec = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None, reason="torchrec is not installed: docs/benchmarks/torchrec.md"
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    one_torch_thread()


@needs_torchrec
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_are_those_of_torchrec(case: Case, optimizer: str) -> None:
    assert largest_difference(case, optimizer, "torchrec", 50) <= BOUNDS[optimizer]


@pytest.mark.parametrize(("number", "case"), enumerate(CASES), ids=[case.name for case in CASES])
def test_losses_are_those_of_torch_modules(number: int, case: Case) -> None:
    optimizer = list(OPTIMIZERS)[number % 3]
    assert largest_difference(case, optimizer, "torch", 10) <= BOUNDS[optimizer]


def test_a_lost_update_exceeds_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from thermocline.torchrec.collections import _Collection

    steps: list[Any] = []
    apply = _Collection.step

    def skip_one(self: _Collection) -> None:
        steps.append(None)
        if len(steps) == 5:
            self.tiers.discard_gradients()
        apply(self)

    monkeypatch.setattr(_Collection, "step", skip_one)
    assert largest_difference(CASES[0], "sgd", "torch", 10) > BOUNDS["sgd"]
