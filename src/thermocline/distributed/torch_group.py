"""`TorchGroup`: collectives of one torch.distributed process group, with the timeout of `heartbeat`.

torch gives Gloo a fixed timeout per operation. Here an operation has none of its own: the caller polls it and raises
when the deadline has passed. Gloo cannot cancel an operation, and destroying its process group waits for it; so a group
with an unfinished operation is never destroyed, and its connections close with the process.

NCCL operations are asynchronous to the caller and keep torch's timeout.

Thread     one at a time
Blocks     until all ranks of the group have made the same call
Raises     RuntimeError, which `Communicator.translate_errors` re-raises as `RankError`
"""

from __future__ import annotations

import ctypes
import datetime
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from thermocline.distributed.heartbeat import CLOSED, Heartbeat

# torch 2.13 renames these functions and warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_POLL = datetime.timedelta(seconds=0.1)
_GLOO_TIMEOUT = datetime.timedelta(days=30)


class TorchGroup:
    """A process group of this rank. Tensors are replaced in place, as in torch.distributed."""

    def __init__(self, process_group: Any, heartbeat: Heartbeat) -> None:
        """Take over the timeout of the group's Gloo operations."""
        self.process_group = process_group
        self._heartbeat = heartbeat
        process_group._get_backend(torch.device("cpu"))._set_default_timeout(_GLOO_TIMEOUT)

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return dist.get_rank(self.process_group)

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return dist.get_world_size(self.process_group)

    def all_to_all(self, out: torch.Tensor, values: torch.Tensor, receives: list[int], sends: list[int]) -> None:
        self._call(dist.all_to_all_single, out, values, receives, sends)

    def all_gather(self, out: Sequence[torch.Tensor], values: torch.Tensor) -> None:
        self._call(dist.all_gather, list(out), values)

    def all_gather_single(self, out: torch.Tensor, values: torch.Tensor) -> None:
        self._call(_all_gather_single, out, values)

    def reduce_scatter_single(self, out: torch.Tensor, values: torch.Tensor) -> None:
        self._call(_reduce_scatter_single, out, values)

    def gather(self, out: Sequence[torch.Tensor], values: torch.Tensor) -> None:
        """Gather on the group's first rank; the others pass an empty `out`."""
        self._call(dist.gather, values, list(out) or None, group_dst=0)

    def all_reduce(self, values: torch.Tensor) -> None:
        self._call(dist.all_reduce, values)

    def broadcast(self, values: torch.Tensor) -> None:
        """Replace the tensor by that of the group's first rank."""
        self._call(dist.broadcast, values, group_src=0)

    def _call(self, function: Any, *args: Any, **options: Any) -> None:
        if self._heartbeat.closed:
            raise RuntimeError(CLOSED)
        start = time.monotonic()
        work = function(*args, **options, group=self.process_group, async_op=True)
        if work is None:
            return
        if any(isinstance(arg, torch.Tensor) and not arg.is_cpu for arg in args):
            work.wait()
            return
        try:
            if not _completed(work):
                with self._heartbeat.waiting(start) as deadline:
                    while not _completed(work):
                        deadline.check("another rank")
        finally:
            if not work.is_completed():
                # Destroying the group would block: keep a reference for ever.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.process_group))


def _completed(work: Any) -> bool:
    """Wait for a moment and return whether the operation is complete. Raises RuntimeError if it failed."""
    try:
        work.wait(_POLL)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has completed meanwhile: raises only its own error
    return True
