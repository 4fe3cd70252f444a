"""Helpers of the kernel tests: comparison of bits, batches with hot slots, rows in a larger arena."""

from __future__ import annotations

import numpy as np
import torch

from thermocline.kernels.segments import Segments, find_segments

_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}

# Sizes of segments: one id, around one block, around two blocks, and several blocks.
SIZES = [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 192, 300]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert equal shape, type, device and bits, also of NaN."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert a.device == b.device
    if a.dtype.is_floating_point:
        a, b = a.contiguous().view(_INTEGERS[a.dtype]), b.contiguous().view(_INTEGERS[b.dtype])
    if not torch.equal(a, b):
        wrong = (a != b).nonzero()
        raise AssertionError(f"{len(wrong)} of {a.numel()} elements differ, the first at {wrong[0].tolist()}")


def slots_of_sizes(sizes: list[int], random: np.random.Generator, device: str) -> torch.Tensor:
    """int32 slots, shuffled: as many different ones as there are sizes, each repeated by its size."""
    chosen = random.choice(2 * len(sizes) + 3, size=len(sizes), replace=False)
    ids = random.permutation(np.repeat(chosen, sizes)).astype(np.int32)
    return torch.from_numpy(ids).to(device)


def random_slots(ids: int, slots: int, random: np.random.Generator, device: str) -> torch.Tensor:
    """int32 slots from a power law: few are hot, most occur once."""
    ranks = (slots ** random.random(ids)).astype(np.int64) - 1
    return torch.from_numpy(random.permutation(slots)[ranks].astype(np.int32)).to(device)


def random_offsets(ids: int, random: np.random.Generator, device: str) -> torch.Tensor:
    """int64 offsets of bags of several sizes, with empty bags also at both ends."""
    cuts = np.sort(random.integers(0, ids + 1, size=max(1, ids // 3)))
    return torch.from_numpy(np.concatenate([[0, 0], cuts, [ids, ids]])).to(device)


def floats(shape: tuple[int, ...], random: np.random.Generator, device: str) -> torch.Tensor:
    return torch.from_numpy(random.normal(size=shape).astype(np.float32)).to(device)


class Arena:
    """Rows of weights and state, each followed by a gap of NaN that must stay unchanged."""

    def __init__(
        self, slots: int, dim: int, state: int, random: np.random.Generator, device: str, *, gap: int = 3
    ) -> None:
        self.all = torch.full((slots, dim + state + gap), float("nan"), device=device)
        self.weights = self.all[:, :dim]
        self.state = self.all[:, dim : dim + state] if state else None
        self.weights.copy_(floats((slots, dim), random, device))
        if self.state is not None:
            self.state.copy_(floats((slots, state), random, device).abs())

    def copy(self) -> Arena:
        twin = object.__new__(Arena)
        twin.all = self.all.clone()
        twin.weights = twin.all[:, : self.weights.shape[1]]
        ends = self.weights.shape[1] + (0 if self.state is None else self.state.shape[1])
        twin.state = None if self.state is None else twin.all[:, self.weights.shape[1] : ends]
        return twin


def exact_segments(slots: torch.Tensor) -> Segments:
    """Segments with exact sizes on the host, as in training."""
    result = find_segments(slots)
    segments, hot, blocks = result.counts.tolist()
    return result.known(segments, hot, blocks)
