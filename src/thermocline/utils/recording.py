"""`Recording`: launches that are recorded once and replayed as one: a CUDA graph, or the function itself on a CPU."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
_streams: dict[int, torch.cuda.Stream] = {}
_capture_lock = threading.Lock()
"""One capture at a time: torch's random generators belong to one graph while it is captured."""
_streams_ahead: dict[torch.device, torch.cuda.Stream] = {}
"""Per device: the stream of recordings that run ahead of training."""


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return `torch.cuda.current_stream(device)`, in a tenth of its time: it makes an object at each call."""
    index = torch.cuda.current_device() if device.index is None else device.index
    handle = torch._C._cuda_getCurrentRawStream(index)
    key = handle if handle else -1 - index  # 0: the default stream of each device
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


class OnStream:
    """A context in which a stream is the current one, as `torch.cuda.stream`, which takes ten times as long."""

    __slots__ = ("_before", "_context", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._before: tuple[int, int, int] = (0, 0, 0)
        self._context: Any = None

    def __enter__(self) -> None:
        stream = self._stream
        if torch._C._cuda_getDevice() != stream.device_index:  # the device changes too
            self._context = torch.cuda.stream(stream)
            self._context.__enter__()
            return
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *error: object) -> None:
        if self._context is not None:
            self._context.__exit__(*error)
        else:
            torch._C._cuda_setStream(*self._before)


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
        ahead: bool = False,
        pool: object = None,
    ) -> None:
        """Record without running. Other threads may launch meanwhile.

        The stream that records is used for nothing else. When page-locked memory is freed, on any thread, torch records
        an event on each stream that copied it and queries it later; an event on a stream that records then invalidates
        the recording, and raises where page-locked memory is next allocated.

        ahead    whether it runs ahead of training, with a higher priority
        pool     `pool` of another recording, whose memory may be used: the two must be replayed in turn
        """
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with (
                _capture_lock,
                _no_garbage_collection(),
                torch.cuda.graph(
                    self._graph,
                    pool=pool,  # type: ignore[arg-type]
                    stream=_stream_ahead(device) if ahead else None,
                    capture_error_mode="thread_local",
                ),
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


def _stream_ahead(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that records what runs ahead. torch hands out 32 streams per priority in turn: this priority is
    used for nothing else, so that no table has the same stream."""
    stream = _streams_ahead.get(device)
    if stream is None:
        stream = _streams_ahead[device] = torch.cuda.Stream(device, priority=-2)  # type: ignore[no-untyped-call]
    return stream


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the context: destroying graphs and page-locked memory is not allowed during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
