"""`prefetch` and `TrainPipelineSparseDist`: rows of coming batches are prepared while the model trains."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from thermocline.batch import Batch
from thermocline.pipeline.prefetch import prefetch as prefetch_batches
from thermocline.torchrec.collections import collections_of, prepared_batch, set_prepared, to_batch
from thermocline.torchrec.jagged_tensor import is_keyed_jagged


def prefetch(loader: Iterable[Any], model: torch.nn.Module, *, depth: int = 4, training: bool = True) -> Iterator[Any]:
    """Iterate over batches of any type with one KeyedJaggedTensor each, whose rows are prepared ahead: `tc.prefetch`.

    The KeyedJaggedTensor is the batch itself, or found in its attributes, list or dict. The collections of the model
    must get this object; a KeyedJaggedTensor that the model makes of it is correct too, but its rows are not ahead.
    """
    return _Prefetched(loader, model, depth, training)


class _Prefetched:
    def __init__(self, loader: Iterable[Any], model: torch.nn.Module, depth: int, training: bool) -> None:
        tables = [table for collection in collections_of(model) for table in collection.tables.values()]
        if not tables:
            raise ValueError("the model has no EmbeddingBagCollection or EmbeddingCollection of thermocline.torchrec")
        self._waiting: deque[Any] = deque()
        self._batches = prefetch_batches(_converted(loader, self._waiting), *tables, depth=depth, training=training)

    def __iter__(self) -> _Prefetched:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        raw = self._waiting.popleft()
        set_prepared(_only_features(raw), batch)
        return raw

    def close(self) -> None:
        """Stop reading ahead and unpin all prepared rows."""
        self._batches.close()


def _converted(loader: Iterable[Any], waiting: deque[Any]) -> Iterator[Batch]:
    """Yield the `tc.Batch` of each batch; the batches themselves wait in order."""
    for raw in loader:
        batch = to_batch(_only_features(raw))
        waiting.append(raw)
        yield batch


def _only_features(raw: Any) -> Any:
    found = list(_find_features(raw))
    if len(found) != 1:
        raise ValueError(
            f"a batch of type {type(raw).__name__} has {len(found)} KeyedJaggedTensors: prefetch needs one; join "
            "several by KeyedJaggedTensor.concat, or iterate without prefetch"
        )
    return found[0]


def _find_features(value: Any) -> Iterator[Any]:
    if is_keyed_jagged(value):
        yield value
    elif isinstance(value, torch.Tensor | str):
        return
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _find_features(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _find_features(part)
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        for part in list(vars(value).values()):
            if is_keyed_jagged(part):
                yield part


class TrainPipelineSparseDist:
    """Trains one batch per `progress(iterator)`, with rows prepared ahead; shaped as the class of TorchRec.

    The model maps a batch to (losses, output). In training mode a call computes the gradients of the summed losses,
    which update rows, and makes a step of `optimizer`, the one of the dense parameters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: Any = "cpu",
        execute_all_batches: bool = True,
        *,
        depth: int = 4,
        custom_model_fwd: Callable[[Any], tuple[torch.Tensor, Any]] | None = None,
    ) -> None:
        """
        device   where `batch.to(device)` moves a batch before the forward pass; its ids are read before
        depth    batches prepared ahead
        """
        if not execute_all_batches:
            raise ValueError("execute_all_batches is False: every batch of the iterator is trained; leave it True")
        self._model, self._optimizer, self._device, self._depth = model, optimizer, torch.device(device), depth
        self._forward = custom_model_fwd or model
        self._source: Any = None
        self._stream: _Prefetched | None = None

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train, or evaluate, the next batch and return the model's output. Raises StopIteration at the end."""
        if self._stream is None or self._source is not dataloader_iter:
            self.close()
            self._source = dataloader_iter
            self._stream = _Prefetched(dataloader_iter, self._model, self._depth, self._model.training)
        try:
            batch = self._moved(next(self._stream))
        except BaseException:
            self.close()
            raise
        if not self._model.training:
            with torch.no_grad():
                return self._forward(batch)[1]
        self._optimizer.zero_grad()
        losses, output = self._forward(batch)
        torch.sum(losses, dim=0).backward()  # type: ignore[no-untyped-call]  # updates rows
        self._optimizer.step()
        return output

    def _moved(self, batch: Any) -> Any:
        if self._device.type == "cpu" or not hasattr(batch, "to"):
            return batch
        prepared = prepared_batch(_only_features(batch))
        moved = batch.to(self._device)
        if prepared is not None:
            set_prepared(_only_features(moved), prepared)
        return moved

    def close(self) -> None:
        """Stop reading ahead. Called at the end of an iterator."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
