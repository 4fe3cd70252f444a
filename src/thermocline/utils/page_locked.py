"""Page-locked memory: small parts that recordings copy from and to, and whether a tensor is in such memory."""

from __future__ import annotations

import threading

import torch

_BLOCK = 1 << 13
_lock = threading.Lock()
_free: list[torch.Tensor] = []
"""The rest of the newest block."""


def fixed_words(count: int, device: torch.device) -> torch.Tensor:
    """Return int64[count] on the host, zero; page-locked if `device` is a GPU.

    The memory is never freed, because a recorded copy may use it as long as its graph runs; and torch records an event
    on each stream that copied page-locked memory when that is freed, which would break a recording on the stream.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int64)
    padded = -(-count // 16) * 16  # cache lines of its own: host and device write different parts
    with _lock:
        if not _free or len(_free[0]) < padded:
            _free[:] = [torch.zeros(max(_BLOCK, padded), dtype=torch.int64, pin_memory=True)]
        words, _free[0] = _free[0][:count], _free[0][padded:]
    return words


def is_page_locked(tensor: torch.Tensor) -> bool:
    """Whether a tensor in host memory can be copied to a GPU without a copy to other host memory before."""
    return tensor.is_pinned()
