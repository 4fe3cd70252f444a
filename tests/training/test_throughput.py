"""Metrics of large batches, which another thread computes."""

from __future__ import annotations

import pytest
import torch

from thermocline.training import throughput
from thermocline.training.throughput import ThroughputMeter


def test_a_thread_computes_the_same_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    steps = [(torch.randn(50), torch.randint(0, 2, (50,)).float()) for _ in range(5)]
    states = []
    for examples in (100, 50):  # below and at the number of examples from which the thread is used
        monkeypatch.setattr(throughput, "_THREAD_EXAMPLES", examples)
        meter = ThroughputMeter([])
        logits, labels = torch.empty(50), torch.empty(50)
        for scores, label in steps:
            meter.add(logits.copy_(scores), labels.copy_(label), 0.5)
            logits.zero_()  # as the next step, which overwrites both
            labels.zero_()
        state, row = meter.state(), meter.row(())
        states.append((state, row["loss"], row["auc"], row["logloss"]))
    assert states[0] == states[1]


def test_an_error_of_the_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "_THREAD_EXAMPLES", 1)
    meter = ThroughputMeter([])
    meter.add(torch.full((4,), torch.nan), torch.zeros(4), 0.5)
    with pytest.raises(ValueError, match="a score is NaN"):
        meter.row(())
