"""Metrics against direct computations, the streaming AUC against its error bound, and saved states."""

from __future__ import annotations

import base64
import json
import math
import re
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from thermocline.training.metrics import (
    AUC,
    Calibration,
    ExactMetrics,
    LogLoss,
    Metric,
    NormalizedEntropy,
    StreamingAUC,
    StreamingMetrics,
    auc,
)

METRICS: list[Callable[..., Metric]] = [AUC, StreamingAUC, LogLoss, NormalizedEntropy, Calibration]


def pairwise_auc(scores: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    positives, negatives = scores[labels == 1][:, None], scores[labels == 0][None]
    return float(((positives > negatives) + 0.5 * (positives == negatives)).mean())


def sample(n: int, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1.5, 1.2, n).astype(np.float32)
    return logits, (rng.random(n) < 1 / (1 + np.exp(-logits))).astype(np.float32)


@given(st.lists(st.tuples(st.sampled_from([-math.inf, -2.5, -1.0, 0.0, 1e-30, 1.0, 3.0]), st.booleans()), min_size=1))
def test_exact_auc_with_ties(examples: list[tuple[float, bool]]) -> None:
    scores = np.array([score for score, _ in examples])
    labels = np.array([label for _, label in examples], np.float32)
    if labels.min() == labels.max():
        assert math.isnan(auc(scores, labels))
    else:
        assert auc(scores, labels) == pytest.approx(pairwise_auc(scores, labels), abs=1e-12)


def test_exact_auc_by_hand() -> None:
    assert auc([1.0, 2.0, 3.0, 4.0], [0, 0, 1, 1]) == 1.0
    assert auc([4.0, 3.0, 2.0, 1.0], [0, 0, 1, 1]) == 0.0
    assert auc([1.0, 1.0, 1.0, 1.0], [0, 1, 0, 1]) == 0.5
    assert auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == 0.75
    assert math.isnan(auc([], []))
    # Adjacent doubles are not ties.
    assert auc(np.array([0.5, np.nextafter(0.5, 1)]), [0, 1]) == 1.0


def test_streaming_auc_is_within_its_error_bound() -> None:
    for seed, bins in ((0, 1 << 16), (1, 1 << 16), (2, 256), (3, 16), (4, 2)):
        logits, labels = sample(50_000, seed)
        streaming = StreamingAUC(bins=bins)
        for part in np.array_split(np.arange(50_000), 7):
            streaming.update(logits[part], labels[part])
        bound = streaming.error_bound()
        assert abs(streaming.compute() - auc(logits, labels)) <= bound + 1e-15
        if bins == 1 << 16:
            assert bound < 1e-4  # as documented for logits of standard deviation 1
            assert abs(streaming.compute() - auc(logits, labels)) < 2e-6  # in practice


@given(st.lists(st.tuples(st.floats(-40, 40), st.booleans()), min_size=2, max_size=60), st.integers(2, 64))
def test_streaming_auc_error_bound_for_any_scores(examples: list[tuple[float, bool]], bins: int) -> None:
    scores = np.array([score for score, _ in examples])
    labels = np.array([label for _, label in examples], np.float32)
    streaming = StreamingAUC(bins=bins)
    streaming.update(scores, labels)
    if labels.min() < labels.max():
        assert abs(streaming.compute() - pairwise_auc(scores, labels)) <= streaming.error_bound() + 1e-12
    else:
        assert math.isnan(streaming.compute())
        assert math.isnan(streaming.error_bound())


def test_logloss_entropy_and_calibration_by_hand() -> None:
    labels = np.array([1, 0, 0, 1])
    p = np.array([0.9, 0.2, 0.4, 0.5])
    loss = -(math.log(0.9) + math.log(0.8) + math.log(0.6) + math.log(0.5)) / 4
    for scores, logits in ((p, False), (np.log(p / (1 - p)), True)):
        expected = {LogLoss: loss, NormalizedEntropy: loss / math.log(2), Calibration: 2.0 / 2}
        for kind, value in expected.items():
            metric = kind(logits=logits)
            metric.update(scores, labels)
            assert metric.compute() == pytest.approx(value, rel=1e-12)


def test_extreme_scores() -> None:
    loss = LogLoss()
    loss.update([1000.0, -1000.0, math.inf, -math.inf], [1, 0, 1, 0])
    assert loss.compute() == 0.0
    loss.update([1000.0], [0])
    assert loss.compute() == 200.0
    certain = LogLoss(logits=False)
    certain.update(np.array([1.0, 0.0], np.float32), [0, 1])
    assert certain.compute() == pytest.approx(-math.log(np.finfo(np.float32).eps), rel=1e-6)


@pytest.mark.parametrize("kind", METRICS)
def test_no_examples_and_one_class(kind: Callable[..., Metric]) -> None:
    metric = kind()
    assert math.isnan(metric.compute())
    metric.update([0.3, 0.1], [0, 0])
    assert math.isnan(metric.compute()) == (kind is not LogLoss)
    metric.reset()
    assert math.isnan(metric.compute())


@pytest.mark.parametrize("kind", [*METRICS, ExactMetrics, StreamingMetrics])
@pytest.mark.parametrize("logits", [True, False])
def test_loaded_state_continues_exactly(kind: Callable[..., Any], logits: bool) -> None:
    scores, labels = sample(3000)
    if not logits:
        scores = 1 / (1 + np.exp(-scores))
    whole, before = kind(logits=logits), kind(logits=logits)
    for first in range(0, 3000, 1000):
        whole.update(scores[first : first + 1000], labels[first : first + 1000])
    before.update(scores[:1000], labels[:1000])
    after = kind(logits=logits).load_state_dict(json.loads(json.dumps(before.state_dict())))
    before.update(scores[1000:], labels[1000:])  # must not change the state already taken
    for first in (1000, 2000):
        after.update(scores[first : first + 1000], labels[first : first + 1000])
    assert after.compute() == whole.compute()
    assert after.state_dict() == whole.state_dict()


def test_state_of_another_metric_raises() -> None:
    with pytest.raises(ValueError, match=r"LogLoss\(logits=True\).*Calibration"):
        Calibration().load_state_dict(LogLoss().state_dict())
    with pytest.raises(ValueError, match="logits=False"):
        AUC().load_state_dict(AUC(logits=False).state_dict())
    with pytest.raises(ValueError, match="16 bins"):
        StreamingAUC().load_state_dict(StreamingAUC(bins=16).state_dict())


def test_all_metrics_together() -> None:
    logits, labels = sample(5000)
    exact, streaming = ExactMetrics(), StreamingMetrics()
    exact.update(logits, labels)
    streaming.update(logits, labels)
    figures = exact.compute()
    assert figures["auc"] == auc(logits, labels)
    assert figures["examples"] == 5000
    assert figures["ne"] < 1
    assert figures["calibration"] == pytest.approx(1, abs=0.05)
    assert streaming.compute() | {"auc": 0} == figures | {"auc": 0}
    assert streaming.compute()["auc"] == pytest.approx(figures["auc"], abs=1e-4)
    exact.reset()
    assert exact.compute()["examples"] == 0


@pytest.mark.parametrize("kind", [ExactMetrics, StreamingMetrics])
def test_merge_equals_all_examples(kind: type[ExactMetrics]) -> None:
    logits, labels = sample(1000)
    whole, first, second = kind(), kind(), kind()
    whole.update(logits, labels)
    first.update(logits[:300], labels[:300])
    second.update(logits[300:], labels[300:])
    first.merge(second)
    assert first.compute() == pytest.approx(whole.compute(), rel=1e-12)
    assert first.compute()["auc"] == whole.compute()["auc"]


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    logits, labels = sample(100)
    tensors, arrays = ExactMetrics(), ExactMetrics()
    tensors.update(torch.from_numpy(logits).requires_grad_().reshape(10, 10), torch.from_numpy(labels).reshape(10, 10))
    arrays.update(logits, labels)
    assert tensors.compute() == arrays.compute()
    half = AUC()
    half.update(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([0, 1]))
    assert half.compute() == 1.0


def test_wrong_arguments() -> None:
    for metric in (AUC(), StreamingAUC(), LogLoss()):
        with pytest.raises(ValueError, match="2 scores with 3 labels"):
            metric.update([1.0, 2.0], [0, 1, 0])
        with pytest.raises(ValueError, match="NaN"):
            metric.update([1.0, math.nan], [0, 1])
        with pytest.raises(ValueError, match=r"a label is 0\.5"):
            metric.update([1.0, 2.0], [0, 0.5])
    with pytest.raises(ValueError, match="logits=True"):
        LogLoss(logits=False).update([1.5], [0])
    with pytest.raises(ValueError, match="at least 2 bins"):
        StreamingAUC(bins=1)


def test_against_torchmetrics() -> None:
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("torchmetrics.functional.classification", reason="torchmetrics is not installed")
    logits, labels = sample(20_000)
    logits = np.round(logits, 2)  # many ties
    expected = functional.binary_auroc(torch.from_numpy(logits), torch.from_numpy(labels).long())
    assert auc(logits, labels) == pytest.approx(float(expected), abs=1e-5)


def bomb(size: int) -> str:
    return base64.b64encode(zlib.compress(bytes(size), 9)).decode()


def test_compressed_states_are_bounded() -> None:
    """A state of a few kilobytes must not expand beyond the size that the metric expects or the state contains."""
    metric = StreamingAUC()
    state = metric.state_dict()
    expanding = {**state, "counts": {"dtype": "<i8", "zlib": bomb(1 << 26)}}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="does not have the stated size of 1048576 bytes"):
            metric.load_state_dict(expanding)
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()
    del state["counts"]["count"]  # as written by earlier versions: the metric knows the size
    metric.load_state_dict(state)


@pytest.mark.parametrize(
    ("labels", "cause"),
    [
        ({"dtype": "|u1", "count": 1, "zlib": bomb(2)}, "stated size of 1 bytes"),
        ({"dtype": "|u1", "count": 3, "zlib": bomb(2)}, "stated size of 3 bytes"),
        ({"dtype": "|u1", "count": 1 << 60, "zlib": bomb(2)}, "count 1152921504606846976"),
        ({"dtype": "|u1", "count": -1, "zlib": bomb(2)}, "count -1"),
        ({"dtype": "|O", "count": 2, "zlib": bomb(16)}, "has dtype '|O'"),
        ({"dtype": "|u1", "count": 2, "zlib": "AAAA"}, "not a zlib stream"),
        ({"dtype": "|u1", "zlib": bomb(2)}, "has no count"),
    ],
)
def test_invalid_states_of_exact_metrics(labels: dict[str, object], cause: str) -> None:
    metric = AUC()
    metric.update([0.5, 0.1], [1, 0])
    with pytest.raises(ValueError, match=re.escape(cause)):
        AUC().load_state_dict({**metric.state_dict(), "labels": labels})
