"""The dedup of a batch: its ids grouped by slot, and hot slots cut into blocks. One stable sort, reused by every op.

A segment is a slot's occurrences, in example order. Segments of more than BLOCK occurrences are hot: several programs
sum them, a block each, and the block sums are added left to right. Nothing here waits for the device: lists have
room for the worst case, and `counts` says how much of them is used.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from thermocline.kernels.launch import blocks

BLOCK = 64
"""Gradients of one key are added in blocks of this many occurrences."""

_TILE = 512


@dataclasses.dataclass(slots=True, eq=False)
class Segments:
    """Which ids share a slot. All int32, on the device."""

    order: torch.Tensor
    """[ids] Positions of ids, grouped by slot, ascending within a slot."""
    slots: torch.Tensor
    """[<= ids] The slot of each segment, ascending."""
    starts: torch.Tensor
    """[<= ids + 1] Segment u is order[starts[u] : starts[u + 1]]."""
    hot: torch.Tensor
    """Numbers of the hot segments, ascending."""
    hot_blocks: torch.Tensor
    """Hot segment h has blocks hot_blocks[h] to hot_blocks[h + 1]."""
    block_starts: torch.Tensor
    """Of each block of a hot segment, in `order`."""
    block_ends: torch.Tensor
    counts: torch.Tensor
    """[3] Segments, hot segments, blocks of hot segments."""
    sizes: tuple[int, int, int]
    """The same on the host: exact once `known` was called, before that upper bounds."""

    @property
    def ids(self) -> int:
        return len(self.order)

    def known(self, segments: int, hot: int, blocks: int) -> Segments:
        """The same with its counts, which the caller has read: later launches are no larger than needed."""
        return dataclasses.replace(self, sizes=(segments, hot, blocks))


def capacities(ids: int) -> tuple[int, int, int]:
    """The most segments, hot segments and blocks of hot segments that so many ids can have."""
    hot = ids // (BLOCK + 1)
    return ids, hot, ids // BLOCK + hot


@triton.jit
def before(counts, index, TILE: tl.constexpr):
    """The sum of the first `index` counts."""
    total = tl.zeros([TILE], tl.int32)
    for first in range(0, index, TILE):
        place = first + tl.arange(0, TILE)
        total += tl.load(counts + place, mask=place < index, other=0)
    return tl.sum(total)


@triton.jit
def _heads(slots, place, ids, rounds, BLOCK: tl.constexpr):
    """Per place of the sorted slots: its slot, whether a segment begins there, and its blocks if it is hot."""
    live = place < ids
    slot = tl.load(slots + place, mask=live, other=-1)
    left = tl.load(slots + place - 1, mask=live & (place > 0), other=-1)
    head = live & ((place == 0) | (slot != left))
    # Hot: the same slot a whole block later. Its end is searched for, by halves, in those tiles that have one.
    later = tl.load(slots + place + BLOCK, mask=head & (place + BLOCK < ids), other=-1)
    hot = head & (later == slot)
    low = place + BLOCK  # of the segment, if it is hot
    high = tl.where(hot, ids, low + 1)  # not of the segment
    if tl.max(hot.to(tl.int32)) > 0:
        for _ in range(rounds):
            search = high - low > 1
            middle = low + (high - low) // 2
            same = tl.load(slots + middle, mask=search, other=-1) == slot
            low = tl.where(search & same, middle, low)
            high = tl.where(search & (same == 0), middle, high)
    return slot, head, tl.where(hot, (high - place + BLOCK - 1) // BLOCK, 0)


@triton.jit(do_not_specialize=["ids", "tiles", "rounds"])
def _count_kernel(slots, tile_counts, ids, tiles, rounds, BLOCK: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0)
    _, head, blocks = _heads(slots, tile * TILE + tl.arange(0, TILE), ids, rounds, BLOCK)
    tl.store(tile_counts + tile, tl.sum(head.to(tl.int32)))
    tl.store(tile_counts + tiles + tile, tl.sum((blocks > 0).to(tl.int32)))
    tl.store(tile_counts + 2 * tiles + tile, tl.sum(blocks))


@triton.jit(do_not_specialize=["ids", "tiles", "rounds"])
def _write_kernel(
    sorted_slots, positions, tile_counts, order, slots, starts, hot, hot_blocks, counts, ids, tiles, rounds,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    live = place < ids
    tl.store(order + place, tl.load(positions + place, mask=live, other=0).to(tl.int32), mask=live)
    slot, head, blocks = _heads(sorted_slots, place, ids, rounds, BLOCK)
    first = before(tile_counts, tile, TILE)
    first_hot = before(tile_counts + tiles, tile, TILE)
    first_block = before(tile_counts + 2 * tiles, tile, TILE)
    segment = first + tl.cumsum(head.to(tl.int32)) - 1
    tl.store(slots + segment, slot, mask=head)
    tl.store(starts + segment, place, mask=head)
    is_hot = blocks > 0
    nth_hot = first_hot + tl.cumsum(is_hot.to(tl.int32)) - 1
    block = first_block + tl.cumsum(blocks) - blocks
    tl.store(hot + nth_hot, segment, mask=is_hot)
    tl.store(hot_blocks + nth_hot, block, mask=is_hot)
    if tile == tiles - 1:
        segments = first + tl.sum(head.to(tl.int32))
        all_hot = first_hot + tl.sum(is_hot.to(tl.int32))
        all_blocks = first_block + tl.sum(blocks)
        tl.store(starts + segments, ids)
        tl.store(hot_blocks + all_hot, all_blocks)
        tl.store(counts, segments)
        tl.store(counts + 1, all_hot)
        tl.store(counts + 2, all_blocks)


@triton.jit(do_not_specialize=["rounds"])
def _blocks_kernel(
    starts, hot, hot_blocks, block_starts, block_ends, counts, rounds, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    all_hot = tl.load(counts + 1)
    all_blocks = tl.load(counts + 2)
    first = tl.program_id(0) * TILE
    if first < all_blocks:
        block = first + tl.arange(0, TILE)
        live = block < all_blocks
        low = tl.zeros([TILE], tl.int32)  # the last hot segment that begins with this block or before
        high = low + all_hot
        for _ in range(rounds):
            search = live & (high - low > 1)
            middle = low + (high - low) // 2
            right = tl.load(hot_blocks + middle, mask=search, other=0) <= block
            low = tl.where(search & right, middle, low)
            high = tl.where(search & (right == 0), middle, high)
        nth = block - tl.load(hot_blocks + low, mask=live, other=0)
        segment = tl.load(hot + low, mask=live, other=0)
        start = tl.load(starts + segment, mask=live, other=0) + nth * BLOCK
        end = tl.load(starts + segment + 1, mask=live, other=0)
        tl.store(block_starts + block, start, mask=live)
        tl.store(block_ends + block, tl.minimum(start + BLOCK, end), mask=live)


def find_segments(slots: torch.Tensor) -> Segments:
    """Groups ids by slot: `slots` is int32[ids], not negative. No read by the host, so `sizes` are upper bounds."""
    if slots.dtype != torch.int32 or slots.dim() != 1 or not slots.is_contiguous():
        raise ValueError(f"slots are {slots.dtype}{list(slots.shape)}: needed is one contiguous row of int32")
    ids = len(slots)
    most, tiles = capacities(ids), blocks(ids, _TILE)
    segments, hot, hot_blocks = most
    sizes = [ids, segments, segments + 1, hot, hot + 1, hot_blocks, hot_blocks, 3, 3 * tiles]
    # One piece of memory: asking for each of them would take longer than the kernels do. Each begins at 16 bytes:
    # kernels are compiled anew for pointers that do not.
    room = [-(-size // 4) * 4 for size in sizes]
    lists = torch.empty(sum(room), dtype=torch.int32, device=slots.device).split(room)
    result = Segments(
        order=lists[0][:ids], slots=lists[1], starts=lists[2], hot=lists[3], hot_blocks=lists[4],
        block_starts=lists[5], block_ends=lists[6], counts=lists[7][:3], sizes=most,
    )  # fmt: skip
    if ids == 0:
        for end in (result.starts, result.hot_blocks, result.counts):
            end.zero_()
        return result
    values, positions = torch.sort(slots, stable=True)
    common = {"ids": ids, "tiles": tiles, "rounds": ids.bit_length(), "BLOCK": BLOCK, "TILE": _TILE}
    _count_kernel[(tiles,)](values, lists[8], **common)
    _write_kernel[(tiles,)](values, positions, lists[8], *lists[:5], lists[7], **common)
    if hot:
        _blocks_kernel[(blocks(hot_blocks, _TILE),)](
            *lists[2:5], *lists[5:8], rounds=hot.bit_length(), BLOCK=BLOCK, TILE=_TILE
        )
    return result


def find_segments_reference(slots: torch.Tensor) -> Segments:
    """The same lists in plain torch, without room to spare."""
    ids = len(slots)
    values, order = torch.sort(slots, stable=True)
    unique, sizes = torch.unique_consecutive(values, return_counts=True)
    ends = sizes.cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    hot = (sizes > BLOCK).nonzero()[:, 0]
    hot_blocks = (sizes[hot] + BLOCK - 1) // BLOCK
    owner = torch.repeat_interleave(torch.arange(len(hot), device=slots.device), hot_blocks)
    firsts = torch.cat([hot_blocks.new_zeros(1), hot_blocks.cumsum(0)])
    nth = torch.arange(len(owner), device=slots.device) - firsts[owner]
    block_starts = starts[hot[owner]] + nth * BLOCK
    block_ends = torch.minimum(block_starts + BLOCK, ends[hot[owner]])
    assert int(starts[-1]) == ids
    found = (len(unique), len(hot), len(owner))
    counts = torch.tensor(found, device=slots.device)
    parts = [order, unique, starts, hot, firsts, block_starts, block_ends, counts]
    order, unique, starts, hot, firsts, block_starts, block_ends, counts = (part.to(torch.int32) for part in parts)
    return Segments(order, unique, starts, hot, firsts, block_starts, block_ends, counts, found)
