"""Metrics of batches that another thread counts, small ones together: the same bits as batch by batch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from thermocline.training import throughput
from thermocline.training.metrics import ExactMetrics, StreamingMetrics
from thermocline.training.throughput import ThroughputMeter


def test_a_thread_computes_the_same_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    steps = [(torch.randn(50), torch.randint(0, 2, (50,)).float()) for _ in range(5)]
    states = []
    for examples in (100, 50):  # below and at the number of examples from which the thread is used
        monkeypatch.setattr(throughput, "_LARGE_EXAMPLES", examples)
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
    monkeypatch.setattr(throughput, "_LARGE_EXAMPLES", 1)
    meter = ThroughputMeter([])
    meter.add(torch.full((4,), torch.nan), torch.zeros(4), 0.5)
    with pytest.raises(ValueError, match="a score is NaN"):
        meter.row(())


def test_the_thread_may_be_some_batches_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """`add` waits only beyond `_MAX_BEHIND` batches, and batches are counted in their order."""
    monkeypatch.setattr(throughput, "_LARGE_EXAMPLES", 40)
    update, gate, counted = StreamingMetrics.update, threading.Event(), list[float]()

    def late(metrics: StreamingMetrics, scores: Any, labels: Any, *, check: bool) -> None:
        assert gate.wait(60)
        counted.append(float(scores[0]))
        update(metrics, scores, labels, check=check)

    monkeypatch.setattr(StreamingMetrics, "update", late)
    meter = ThroughputMeter([])
    for n in range(throughput._MAX_BEHIND):
        meter.add(torch.full((50,), float(n)), torch.ones(50), 0.5)
    assert not counted
    beyond = threading.Thread(target=meter.add, args=(torch.full((50,), -1.0), torch.zeros(50), 0.5))
    beyond.start()
    beyond.join(0.2)
    assert beyond.is_alive()
    gate.set()
    beyond.join(60)
    meter.add(torch.zeros(3), torch.ones(3), 0.5)  # kept, and counted after the others
    assert meter.row(())["examples"] == 50 * throughput._MAX_BEHIND + 53
    assert counted == [*map(float, range(throughput._MAX_BEHIND)), -1.0]


@pytest.mark.parametrize("size", [1, 7, 129, 1000, 3000, 5000])
def test_joined_batches_give_the_same_bits(size: int) -> None:
    rng = np.random.default_rng(size)
    sizes = [size] * (2 * 16384 // size // 10 + 37) + [3, size, size]  # whole groups, a rest, and another size
    if size > 1000:
        sizes = sizes[-12:]
    expected, joined_window = StreamingMetrics(), ExactMetrics()
    meter, alone = ThroughputMeter([], window=joined_window), ExactMetrics()
    for count in sizes:
        scores = torch.from_numpy(rng.normal(scale=4, size=count).astype(np.float32))
        labels = torch.from_numpy((rng.random(count) < 0.3).astype(np.float32))
        meter.add(scores, labels, 0.25)
        expected.update(scores, labels)
        alone.update(scores, labels)
        scores.zero_()
    assert meter.state() == expected.state_dict()
    assert joined_window.state_dict() == alone.state_dict()


def test_a_nan_score_of_a_small_batch_is_an_error_at_once() -> None:
    meter = ThroughputMeter([])
    meter.add(torch.tensor([-torch.inf, torch.inf, 0.0]), torch.zeros(3), 0.5)
    with pytest.raises(ValueError, match="a score is NaN"):
        meter.add(torch.tensor([0.0, torch.nan, 1.0]), torch.zeros(3), 0.5)
