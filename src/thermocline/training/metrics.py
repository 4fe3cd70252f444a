"""How good the predictions are: AUC (exact, and streaming in fixed memory), logloss, normalised entropy, calibration.

Each is a small accumulator: `update(scores, labels)` per batch, `compute()` at any time, `state_dict()` as JSON, from
which another one goes on exactly. Scores are logits; with `logits=False` probabilities. NumPy arrays or torch tensors;
labels are 0 or 1. What is not defined (no examples, one kind of label) computes to NaN.
"""

from __future__ import annotations

import abc
import base64
import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from thermocline.arrays import as_numpy

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Groups

_Array = npt.NDArray[Any]


class Metric(abc.ABC):
    """One figure over all examples seen. Not thread-safe."""

    def __init__(self, *, logits: bool = True) -> None:
        self.logits = logits
        self.reset()

    def update(self, scores: Any, labels: Any) -> None:
        """One batch: as many scores as labels, of any shape."""
        self._add(*_checked(scores, labels))

    @abc.abstractmethod
    def reset(self) -> None:
        """Forgets all examples."""

    @abc.abstractmethod
    def compute(self) -> float:
        """Over everything since the last reset."""

    @abc.abstractmethod
    def _add(self, scores: _Array, labels: _Array) -> None: ...

    @abc.abstractmethod
    def _state(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"metric": type(self).__name__, "logits": self.logits, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Goes on where `state` was taken."""
        if state.get("metric") != type(self).__name__ or state.get("logits") != self.logits:
            raise ValueError(
                f"this is the state of {state.get('metric')}(logits={state.get('logits')}): it cannot go on in "
                f"{type(self).__name__}(logits={self.logits})"
            )
        self._load(state)
        return self


# ---- AUC


def auc(scores: Any, labels: Any) -> float:
    """The exact area under the ROC curve: how often a positive scores above a negative, ties counting half."""
    values, classes = _checked(scores, labels)
    order = np.argsort(values, kind="stable")
    values, classes = values[order], classes[order]
    if not len(values):
        return math.nan
    first = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))  # of each run of equal scores
    positives = np.add.reduceat(classes, first, dtype=np.int64)
    return _area(positives, np.diff(np.append(first, len(values))) - positives)


def _area(positives: _Array, negatives: _Array) -> float:
    """From counts per score, scores ascending. Whole numbers up to the last division."""
    total = int(positives.sum()) * int(negatives.sum())
    if total == 0:
        return math.nan
    below = np.cumsum(negatives) - negatives
    doubled = np.multiply(positives, 2 * below + negatives, dtype=np.float64 if total >= 2**61 else np.int64)
    return float(doubled.sum()) / (2 * total)


class AUC(Metric):
    """Exact. Keeps every score: 4 to 8 bytes per example and 1 for its label, so it is for test sets."""

    def reset(self) -> None:
        """Forgets all examples."""
        self._scores: list[_Array] = []
        self._labels: list[_Array] = []

    def _add(self, scores: _Array, labels: _Array) -> None:
        self._scores.append(scores.copy())
        self._labels.append(labels.astype(np.uint8))

    def compute(self) -> float:
        """The area: see `auc`."""
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
        self._scores, self._labels = [_decode(state["scores"])], [_decode(state["labels"])]


class StreamingAUC(Metric):
    """AUC in fixed memory (16 bytes per bin, 1 MB): logits are counted in equal bins over [-limit, limit].

    Scores of one bin count as ties, as do those beyond the limits: wrong by at most half the share of (positive,
    negative) pairs that share a bin. `error_bound()` gives that for the data seen. Ahead of time: with bins of width
    w = 2 * limit / bins and negatives nowhere denser than d per unit of logit, at most w * d / 2; for logits with
    deviation 1 and the default bins 0.0001, in practice far less.
    """

    def __init__(self, *, bins: int = 1 << 16, limit: float = 16.0, logits: bool = True) -> None:
        if bins < 2 or not 0 < limit < math.inf:
            raise ValueError(f"bins is {bins}, limit {limit}: at least 2 bins over a finite range")
        self.bins, self.limit = bins, limit
        super().__init__(logits=logits)

    def reset(self) -> None:
        """Forgets all examples."""
        self._counts = np.zeros((2, self.bins), np.int64)  # negatives, positives

    def _add(self, scores: _Array, labels: _Array) -> None:
        logits = scores if self.logits else _logit(scores)
        places = (np.clip(logits, -self.limit, self.limit) + self.limit) * (self.bins / (2 * self.limit))
        bins = np.minimum(places.astype(np.int64), self.bins - 1)
        # Where they are: a histogram of every bin per batch costs more than the batch, and its room in the caches.
        np.add.at(self._counts.reshape(-1), bins + self.bins * labels.astype(np.int64), 1)

    def compute(self) -> float:
        """The area, `error_bound()` from the exact one at most."""
        return _area(self._counts[1], self._counts[0])

    def error_bound(self) -> float:
        """How far from exact `compute()` can be."""
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
                f"the state has {state['bins']} bins up to {state['limit']}, this metric {self.bins} up to {self.limit}"
            )
        self._counts = _decode(state["counts"]).reshape(2, self.bins).copy()


# ---- metrics that are sums


class _Sums(Metric):
    """What the others are made of, in double."""

    def reset(self) -> None:
        """Forgets all examples."""
        self.examples = 0
        self._clicks = 0
        self._loss = self._predicted = 0.0

    def _add(self, scores: _Array, labels: _Array) -> None:
        x = (scores if self.logits else _logit(scores)).astype(np.float64)
        small = np.exp(-np.abs(x))  # never overflows
        self.examples += len(x)
        self._clicks += int(np.count_nonzero(labels))
        self._loss += float((np.log1p(small) + np.maximum(np.where(labels, -x, x), 0)).sum())
        self._predicted += float((np.where(x >= 0, 1.0, small) / (1 + small)).sum())

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
    """Mean binary cross entropy, in nats. Probabilities of 0 and 1 are taken as their dtype's epsilon off."""

    def compute(self) -> float:
        """The mean."""
        return self.logloss


class NormalizedEntropy(_Sums):
    """Logloss over that of always predicting the mean label: 1 has learned nothing, lower is better."""

    def compute(self) -> float:
        """The ratio."""
        return self.ne


class Calibration(_Sums):
    """Mean prediction over mean label: 1 is right, 1.1 promises 10 % too many clicks."""

    def compute(self) -> float:
        """The ratio."""
        return self.calibration


# ---- all of them


class ExactMetrics:
    """All metrics at once, with exact AUC: for test sets."""

    _auc_type: type[AUC] | type[StreamingAUC] = AUC

    def __init__(self, *, logits: bool = True) -> None:
        self._auc: AUC | StreamingAUC = self._auc_type(logits=logits)
        self._sums = LogLoss(logits=logits)

    def update(self, scores: Any, labels: Any) -> None:
        """One batch."""
        checked = _checked(scores, labels)
        self._auc._add(*checked)
        self._sums._add(*checked)

    def merge(self, other: Self) -> None:
        """Adds what another one of this kind has seen: another rank's."""
        self._auc._merge(other._auc)  # type: ignore[arg-type]
        self._sums._merge(other._sums)

    def joined(self, groups: Groups) -> Self:
        """What all ranks have seen, on all of them the same. All ranks call it."""
        whole = type(self)(logits=self._sums.logits)
        for state in groups.train.all_gather_object(self.state_dict(), "joined metrics"):
            whole.merge(type(self)(logits=self._sums.logits).load_state_dict(state))
        return whole

    def compute(self) -> dict[str, float]:
        """auc, logloss, ne (normalised entropy), calibration; and the number of examples."""
        sums = self._sums
        return {
            "auc": self._auc.compute(),
            "logloss": sums.logloss,
            "ne": sums.ne,
            "calibration": sums.calibration,
            "examples": sums.examples,
        }

    def reset(self) -> None:
        """Forgets all examples."""
        self._auc.reset()
        self._sums.reset()

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"auc": self._auc.state_dict(), "sums": self._sums.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Goes on where `state` was taken."""
        self._auc.load_state_dict(state["auc"])
        self._sums.load_state_dict(state["sums"])
        return self


class StreamingMetrics(ExactMetrics):
    """All metrics at once in fixed memory, AUC by `StreamingAUC`: for training."""

    _auc_type = StreamingAUC


# ---- arrays


def _checked(scores: Any, labels: Any) -> tuple[_Array, _Array]:
    """One-dimensional scores (float32 or float64, no NaN) and labels (0 or 1)."""
    values, classes = _floats(scores, "scores"), _floats(labels, "labels")
    if values.shape != classes.shape:
        raise ValueError(f"{len(values)} scores with {len(classes)} labels: there is one label per score")
    if np.isnan(values).any():
        raise ValueError("a score is NaN: the model has diverged, or its inputs hold NaN")
    if not ((classes == 0) | (classes == 1)).all():
        wrong = classes[(classes != 0) & (classes != 1)][0]
        raise ValueError(
            f"a label is {wrong}: labels are 0 or 1; a reader makes them so by data.label_threshold (4: ratings from 4)"
        )
    return values, classes


def _floats(value: Any, what: str) -> _Array:
    if hasattr(value, "detach"):  # a torch tensor, maybe on a GPU, maybe of a dtype that NumPy lacks
        value = value.detach().cpu()
        if value.dtype.itemsize < 4:
            value = value.float()
    array = np.asarray(value) if isinstance(value, (list, tuple)) else as_numpy(value, what)
    return array.reshape(-1) if array.dtype == np.float32 else array.reshape(-1).astype(np.float64)


def _logit(probabilities: _Array) -> _Array:
    if len(probabilities) and not (probabilities.min() >= 0 and probabilities.max() <= 1):
        raise ValueError("a probability lies outside [0, 1]: for logits, make the metric with logits=True")
    epsilon = float(np.finfo(probabilities.dtype).eps)
    p = np.clip(probabilities.astype(np.float64), epsilon, 1 - epsilon)
    return np.log(p) - np.log1p(-p)


def _join(arrays: list[_Array], dtype: type) -> _Array:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _encode(array: _Array) -> dict[str, str]:
    data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
    return {"dtype": data.dtype.str, "zlib": base64.b64encode(zlib.compress(data.tobytes(), 1)).decode("ascii")}


def _decode(state: Mapping[str, str]) -> _Array:
    return np.frombuffer(zlib.decompress(base64.b64decode(state["zlib"])), np.dtype(state["dtype"]))
