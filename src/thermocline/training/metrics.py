"""Metrics of binary predictions: AUC (exact, or streaming in fixed memory), log loss, normalized entropy, calibration.

Each metric is an accumulator: `update(scores, labels)` per batch, `compute()` at any time. `state_dict()` returns JSON
values from which another instance continues exactly. Scores are logits, or probabilities with `logits=False`; labels
are 0 or 1. Both are NumPy arrays, torch tensors or lists. Undefined values (no examples, one class) are NaN.
"""

from __future__ import annotations

import abc
import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from thermocline.arrays import as_numpy
from thermocline.core import core
from thermocline.errors import LabelError
from thermocline.utils.untrusted_files import decompress

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Groups

_Array = npt.NDArray[Any]
_MAX_STATE_BYTES = 1 << 34
NAN_SCORE = "a score is NaN: the model diverged, or its inputs contain NaN"


class Metric(abc.ABC):
    """One number over all examples since the last reset. Not thread-safe."""

    def __init__(self, *, logits: bool = True) -> None:
        self.logits = logits
        self.reset()

    def update(self, scores: Any, labels: Any) -> None:
        """Add one batch: `scores` and `labels` of equal size and any shape."""
        self._add(*_checked(scores, labels))

    @abc.abstractmethod
    def reset(self) -> None:
        """Remove all examples."""

    @abc.abstractmethod
    def compute(self) -> float:
        """Return the metric over all examples since the last reset."""

    @abc.abstractmethod
    def _add(self, scores: _Array, labels: _Array) -> None: ...

    @abc.abstractmethod
    def _state(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"metric": type(self).__name__, "logits": self.logits, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Replace the state by a `state_dict()` of the same metric."""
        if state.get("metric") != type(self).__name__ or state.get("logits") != self.logits:
            raise ValueError(
                f"the state belongs to {state.get('metric')}(logits={state.get('logits')}): "
                f"it cannot be loaded into {type(self).__name__}(logits={self.logits})"
            )
        self._load(state)
        return self


# ---- AUC


def auc(scores: Any, labels: Any) -> float:
    """Exact area under the ROC curve: share of (positive, negative) pairs ranked correctly, ties counted half."""
    values, classes = _checked(scores, labels)
    order = np.argsort(values, kind="stable")
    values, classes = values[order], classes[order]
    if not len(values):
        return math.nan
    first = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))  # of each run of equal scores
    positives = np.add.reduceat(classes, first, dtype=np.int64)
    return _area(positives, np.diff(np.append(first, len(values))) - positives)


def _area(positives: _Array, negatives: _Array) -> float:
    """Area from counts per score, in ascending order of scores. Integer arithmetic up to the last division."""
    total = int(positives.sum()) * int(negatives.sum())
    if total == 0:
        return math.nan
    below = np.cumsum(negatives) - negatives
    doubled = np.multiply(positives, 2 * below + negatives, dtype=np.float64 if total >= 2**61 else np.int64)
    return float(doubled.sum()) / (2 * total)


class AUC(Metric):
    """Exact AUC. Keeps all scores, 5 to 9 bytes per example: suitable for test sets."""

    def reset(self) -> None:
        """Remove all examples."""
        self._scores: list[_Array] = []
        self._labels: list[_Array] = []

    def _add(self, scores: _Array, labels: _Array) -> None:
        self._scores.append(scores.copy())
        self._labels.append(labels.astype(np.uint8))

    def compute(self) -> float:
        """Return the exact area, see `auc`."""
        return auc(_join(self._scores, np.float32), _join(self._labels, np.uint8))

    def _merge(self, other: Self) -> None:
        self._scores.extend(other._scores)
        self._labels.extend(other._labels)

    def _state(self) -> dict[str, Any]:
        return {
            "scores": _encode(_join(self._scores, np.float32)),
            "labels": _encode(_join(self._labels, np.uint8)),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        labels = _decode(state["labels"], ("|u1",))
        self._scores, self._labels = [_decode(state["scores"], ("<f4", "<f8"), len(labels))], [labels]


class StreamingAUC(Metric):
    """AUC in fixed memory (16 bytes per bin, 1 MB): a histogram of logits with equal bins over [-limit, limit].

    Logits outside the range fall into the outer bins. Scores in one bin count as ties, so the error is at most half
    the share of (positive, negative) pairs in a common bin: `error_bound()` for the data so far. A priori, with bins of
    width w = 2 * limit / bins and a density of negatives of at most d per unit of logit, the error is at most
    w * d / 2: 0.0001 for logits of standard deviation 1 and the default bins, and far less in practice.
    """

    def __init__(self, *, bins: int = 1 << 16, limit: float = 16.0, logits: bool = True) -> None:
        if bins < 2 or not 0 < limit < math.inf:
            raise ValueError(f"bins is {bins}, limit is {limit}: use at least 2 bins and a positive, finite limit")
        self.bins, self.limit = bins, limit
        super().__init__(logits=logits)

    def reset(self) -> None:
        """Remove all examples."""
        self._counts = np.zeros((2, self.bins), np.int64)  # negatives, positives

    def _add(self, scores: _Array, labels: _Array) -> None:
        logits = scores if self.logits else _logit(scores)
        core.count_scores(logits, labels.astype(logits.dtype, copy=False), self.limit, self._counts)

    def compute(self) -> float:
        """Return the area; it differs from the exact one by at most `error_bound()`."""
        return _area(self._counts[1], self._counts[0])

    def error_bound(self) -> float:
        """Return the largest possible difference between `compute()` and the exact AUC."""
        negatives, positives = self._counts.astype(np.float64)
        pairs = negatives.sum() * positives.sum()
        return float((negatives * positives).sum() / (2 * pairs)) if pairs else math.nan

    def _merge(self, other: Self) -> None:
        self._counts += other._counts

    def _state(self) -> dict[str, Any]:
        return {"bins": self.bins, "limit": self.limit, "counts": _encode(self._counts.reshape(-1))}

    def _load(self, state: Mapping[str, Any]) -> None:
        if (state["bins"], state["limit"]) != (self.bins, self.limit):
            raise ValueError(
                f"the state has {state['bins']} bins, limit {state['limit']}: this metric has {self.bins}, {self.limit}"
            )
        self._counts = _decode(state["counts"], ("<i8",), 2 * self.bins).reshape(2, self.bins).copy()


# ---- metrics computed from sums


class _Sums(Metric):
    """Sums of labels, predictions and log losses, in double precision."""

    def reset(self) -> None:
        """Remove all examples."""
        self.examples = 0
        self._clicks = 0
        self._loss = self._predicted = 0.0

    def _add(self, scores: _Array, labels: _Array) -> None:
        logits = scores if self.logits else _logit(scores)
        self.examples += logits.size
        batches, classes = np.atleast_2d(logits, labels.astype(logits.dtype, copy=False))
        self._clicks += core.count_labels(classes.reshape(-1))[0]
        for batch, label in zip(batches, classes, strict=True):  # joining batches must not change a bit
            loss, predicted = core.sum_scores(batch, label)
            self._loss += loss
            self._predicted += predicted

    @property
    def logloss(self) -> float:
        return self._loss / self.examples if self.examples else math.nan

    @property
    def ne(self) -> float:
        rate = self._clicks / self.examples if self.examples else 0.0
        if rate in (0.0, 1.0):
            return math.nan
        return self.logloss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))

    @property
    def calibration(self) -> float:
        return self._predicted / self._clicks if self._clicks else math.nan

    def _merge(self, other: Self) -> None:
        self.examples += other.examples
        self._clicks += other._clicks
        self._loss += other._loss
        self._predicted += other._predicted

    def _state(self) -> dict[str, Any]:
        return {"examples": self.examples, "clicks": self._clicks, "loss": self._loss, "predicted": self._predicted}

    def _load(self, state: Mapping[str, Any]) -> None:
        self.examples, self._clicks = state["examples"], state["clicks"]
        self._loss, self._predicted = state["loss"], state["predicted"]


class LogLoss(_Sums):
    """Mean binary cross entropy, in nats. Probabilities are clipped by the epsilon of their dtype."""

    def compute(self) -> float:
        """Return the mean."""
        return self.logloss


class NormalizedEntropy(_Sums):
    """Log loss divided by that of a constant prediction of the mean label; lower is better, 1 is no better than it."""

    def compute(self) -> float:
        """Return the ratio."""
        return self.ne


class Calibration(_Sums):
    """Mean prediction divided by mean label: 1 is calibrated, 1.1 predicts 10 % too many positives."""

    def compute(self) -> float:
        """Return the ratio."""
        return self.calibration


# ---- all metrics together


class ExactMetrics:
    """All metrics together, with exact AUC: for test sets."""

    _auc_type: type[AUC] | type[StreamingAUC] = AUC

    def __init__(self, *, logits: bool = True) -> None:
        self._auc: AUC | StreamingAUC = self._auc_type(logits=logits)
        self._sums = LogLoss(logits=logits)

    def update(self, scores: Any, labels: Any, *, check: bool = True) -> None:
        """Add one batch. `check`: False if `check_labels` has passed the labels."""
        checked = _checked(scores, labels, check)
        self._auc._add(*checked)
        self._sums._add(*checked)

    def update_joined(self, scores: _Array, labels: _Array) -> None:
        """Add batches of equal size, one per row of float32[batches, size], whose labels are checked and whose scores
        are no NaN. The result is that of `update` with each row."""
        self._auc._add(scores.reshape(-1), labels.reshape(-1))
        self._sums._add(scores, labels)

    def merge(self, other: Self) -> None:
        """Add the examples of another instance, for example of another rank."""
        self._auc._merge(other._auc)  # type: ignore[arg-type]
        self._sums._merge(other._sums)

    def joined(self, groups: Groups) -> Self:
        """Merge the metrics of all ranks; collective, with the same result on every rank."""
        from thermocline.distributed.messages import decode, encode

        merged = type(self)(logits=self._sums.logits)
        for message in groups.train.all_gather_message(encode(self.state_dict()), "merging metrics"):
            merged.merge(type(self)(logits=self._sums.logits).load_state_dict(decode(message)))
        return merged

    def compute(self) -> dict[str, float]:
        """Return auc, logloss, ne (normalized entropy), calibration and the number of examples."""
        sums = self._sums
        return {
            "auc": self._auc.compute(),
            "logloss": sums.logloss,
            "ne": sums.ne,
            "calibration": sums.calibration,
            "examples": sums.examples,
        }

    def reset(self) -> None:
        """Remove all examples."""
        self._auc.reset()
        self._sums.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"auc": self._auc.state_dict(), "sums": self._sums.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Replace the state by a `state_dict()` of the same metric."""
        self._auc.load_state_dict(state["auc"])
        self._sums.load_state_dict(state["sums"])
        return self


class StreamingMetrics(ExactMetrics):
    """All metrics together in fixed memory, with `StreamingAUC`: for training."""

    _auc_type = StreamingAUC


# ---- arrays


def _checked(scores: Any, labels: Any, check: bool = True) -> tuple[_Array, _Array]:
    """Return one-dimensional scores (float32 or float64, no NaN) and labels (0 or 1)."""
    values, classes = _floats(scores, "scores"), _floats(labels, "labels")
    if values.shape != classes.shape:
        raise ValueError(f"{len(values)} scores with {len(classes)} labels: pass one label per score")
    if np.isnan(values).any():
        raise ValueError(NAN_SCORE)
    if check:
        check_labels(classes)
    return values, classes


def check_labels(labels: Any) -> None:
    """Raise `LabelError` unless all labels are 0 or 1."""
    classes = _floats(labels, "labels")
    _, others = core.count_labels(classes)
    if others:
        wrong = classes[(classes != 0) & (classes != 1)][0]
        raise LabelError(f"a label is {wrong}: labels must be 0 or 1. To convert ratings, set data.label_threshold")


def _floats(value: Any, what: str) -> _Array:
    if hasattr(value, "detach"):  # a torch tensor, possibly on a GPU or of a dtype without a NumPy equivalent
        if value.is_cuda or value.requires_grad:
            value = value.detach().cpu()
        if value.dtype.itemsize < 4:
            value = value.float()
    array = np.asarray(value) if isinstance(value, (list, tuple)) else as_numpy(value, what)
    return array.reshape(-1) if array.dtype == np.float32 else array.reshape(-1).astype(np.float64)


def _logit(probabilities: _Array) -> _Array:
    if len(probabilities) and not (probabilities.min() >= 0 and probabilities.max() <= 1):
        raise ValueError("a probability is outside [0, 1]: for logits, construct the metric with logits=True")
    epsilon = float(np.finfo(probabilities.dtype).eps)
    p = np.clip(probabilities.astype(np.float64), epsilon, 1 - epsilon)
    return np.log(p) - np.log1p(-p)


def _join(arrays: list[_Array], dtype: type) -> _Array:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _encode(array: _Array) -> dict[str, Any]:
    data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
    packed = base64.b64encode(zlib.compress(data.tobytes(), 1)).decode("ascii")
    return {"dtype": data.dtype.str, "count": len(data), "zlib": packed}


def _decode(state: Mapping[str, Any], dtypes: Sequence[str], count: int | None = None) -> _Array:
    """Return an array of `_encode`. Raises ValueError unless it has one of the dtypes and `count` elements.

    count   None: the count that the state contains
    """
    count = state.get("count") if count is None else count
    if state["dtype"] not in dtypes:
        raise ValueError(f"the state of a metric has dtype {state['dtype']!r}: it must be one of {', '.join(dtypes)}")
    if count is None:
        raise ValueError("the state of a metric has no count: an earlier version saved it; compute the metric again")
    size = count * np.dtype(state["dtype"]).itemsize
    if not 0 <= size <= _MAX_STATE_BYTES:
        raise ValueError(f"the state of a metric has count {count}: at most {_MAX_STATE_BYTES} bytes can be read")
    return np.frombuffer(decompress(base64.b64decode(state["zlib"]), size), state["dtype"])
