"""`Recording`: launches that are recorded once and replayed as one: a CUDA graph, or the function itself on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
_streams: dict[int, torch.cuda.Stream] = {}
_capture_lock = threading.Lock()
"""One capture at a time: torch's random generators belong to one graph while it is captured."""


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return `torch.cuda.current_stream(device)`, in a tenth of its time: it makes an object at each call."""
    index = torch.cuda.current_device() if device.index is None else device.index
    handle = torch._C._cuda_getCurrentRawStream(index)
    key = handle if handle else -1 - index  # 0: the default stream of each device
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


class Recording(Generic[T]):
    """A function without arguments whose launches are replayed.

    It reads and writes tensors at fixed addresses, and what it reads on the host counts for all replays. It must have
    run before on the same shapes, so that its kernels are compiled and loaded. On a CPU each replay calls it: tests
    cover everything but the capture.
    """

    def __init__(
        self,
        function: Callable[[], T],
        device: torch.device,
        *,
        stream: torch.cuda.Stream | None = None,
        pool: object = None,
    ) -> None:
        """Record without running. Other threads may launch meanwhile, on other streams.

        stream   stream to record on; by default one of torch
        pool     `pool` of another recording, whose memory may be used: the two must be replayed in turn
        """
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with (
                _capture_lock,
                torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"),  # type: ignore[arg-type]
            ):
                self.result = function()

    @property
    def pool(self) -> object:
        """Memory of the recording; None on a CPU."""
        return None if self._graph is None else self._graph.pool()

    def replay(self) -> T:
        """Launch on the current stream. Returns the tensors that the function returned, with new values."""
        if self._graph is None:
            self.result = self._function()
        else:
            self._graph.replay()
        return self.result
