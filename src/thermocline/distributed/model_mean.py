"""The mean of a dense model over ranks: for evaluation, at the end of training, or from the saved states of all ranks.

All use one definition. A tensor that is equal on all ranks stays unchanged: the mean of equal numbers may differ from
them by rounding. Other floating-point tensors become their mean, added in the order of `tree_sum` in float32, or
float64 for float64 tensors. All other tensors (counters of batches) become rank 0's. So evaluation during training, the
model that `fit` leaves and a model loaded from a checkpoint have the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from thermocline.distributed.hierarchical_allreduce import FlatBuffer, HierarchicalAllReduce


@contextlib.contextmanager
def replaced_by_mean(tensors: Sequence[torch.Tensor], allreduce: HierarchicalAllReduce) -> Iterator[None]:
    """Replace the tensors by their mean over ranks inside the block. Afterwards they have their own memory again.

    Collective: all ranks pass tensors of the same shapes in the same order, between steps, on the training thread.

    allreduce   exact, over all ranks
    """
    different, means = _means_of_different(tensors, allreduce)
    own = [tensor.data for tensor in different]
    try:
        for tensor, mean in zip(different, means, strict=True):
            tensor.data = mean
        yield
    finally:
        for tensor, data in zip(different, own, strict=True):
            tensor.data = data


@torch.no_grad()
def set_to_mean(tensors: Sequence[torch.Tensor], allreduce: HierarchicalAllReduce) -> bool:
    """Copy their mean over ranks into the tensors; return whether any differed. Called as `replaced_by_mean` is."""
    different, means = _means_of_different(tensors, allreduce)
    for tensor, mean in zip(different, means, strict=True):
        tensor.copy_(mean)
    return bool(different)


def _means_of_different(
    tensors: Sequence[torch.Tensor], allreduce: HierarchicalAllReduce
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that are not equal on all ranks, and their means."""
    if allreduce.world == 1 or not tensors:
        return [], []
    different = _different(tensors, allreduce)
    return different, _means(different, allreduce)


@torch.no_grad()
def _different(tensors: Sequence[torch.Tensor], allreduce: HierarchicalAllReduce) -> list[torch.Tensor]:
    """Return the tensors whose bits are not equal on all ranks."""
    digests = np.zeros((len(tensors), 2), np.int64)
    for digest, tensor in zip(digests, tensors, strict=True):
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        digest[:] = np.frombuffer(hashlib.blake2b(content, digest_size=16).digest(), np.int64)
    own = torch.from_numpy(digests).to(tensors[0].device)
    first = own.clone()
    allreduce.broadcast(first)
    is_different = torch.zeros(allreduce.padded_length(len(tensors)), device=own.device)
    is_different[: len(tensors)] = (own != first).any(dim=1)
    allreduce.average(is_different)  # above 0: different from rank 0's on some rank
    return [tensor for tensor, share in zip(tensors, is_different.tolist(), strict=False) if share > 0]


@torch.no_grad()
def _means(tensors: Sequence[torch.Tensor], allreduce: HierarchicalAllReduce) -> list[torch.Tensor]:
    means = [tensor.detach().clone() for tensor in tensors]
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for mean in means:
        if mean.is_floating_point():
            by_dtype.setdefault(_sum_dtype(mean), []).append(mean)
        else:
            allreduce.broadcast(mean)
    for group in by_dtype.values():
        flat = FlatBuffer(group, allreduce)
        flat.copy_from(group)
        allreduce.average(flat.buffer)
        flat.copy_to(group)
    return means


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class TensorMean:
    """The mean of named tensors over ranks, added one rank at a time: memory holds three copies, not one per rank."""

    def __init__(self) -> None:
        self._first: dict[str, torch.Tensor] = {}
        """Tensors of rank 0."""
        self._different: set[str] = set()
        """Names of tensors that are not equal on all ranks."""
        self._node_sum: dict[str, torch.Tensor] = {}
        self._total: dict[str, torch.Tensor] = {}
        self._node: int | None = None
        self._ranks = 0

    def add(self, node: int, tensors: dict[str, torch.Tensor]) -> None:
        """Add the tensors of the next rank, which is on `node`. Raises ValueError if its names or shapes differ."""
        if node != self._node:
            self._add_node_sum()
            self._node = node
        if not self._ranks:
            self._first = dict(tensors)
        for name in {**self._first, **tensors}:
            shapes = [values[name].shape if name in values else None for values in (self._first, tensors)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"{name} has shape {shapes[1]} on rank {self._ranks}, but {shapes[0]} on rank 0")
        self._ranks += 1
        for name, tensor in tensors.items():
            first = self._first[name]
            if tensor is not first and not same_bits(tensor, first):
                self._different.add(name)
            if not tensor.is_floating_point():
                continue
            if name in self._node_sum:
                self._node_sum[name] += tensor
            else:
                self._node_sum[name] = tensor.detach().to(_sum_dtype(tensor), copy=True)

    def _add_node_sum(self) -> None:
        for name, part in self._node_sum.items():
            if name in self._total:
                self._total[name] += part
            else:
                self._total[name] = part
        self._node_sum = {}

    def result(self) -> dict[str, torch.Tensor]:
        """Return the mean of all ranks that were added."""
        self._add_node_sum()
        means = dict(self._first)
        for name in self._different & self._total.keys():
            means[name] = (self._total[name] * (1 / self._ranks)).to(self._first[name].dtype)
        return means


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether dtype and bits of two tensors of the same shape are equal."""
    if one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
