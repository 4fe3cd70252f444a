"""find_segments: deduplicates a batch. Groups its ids by slot with one stable sort, and splits hot slots into blocks.

A segment is the occurrences of one slot, in example order. Segments of more than BLOCK occurrences are hot: several
programs sum them, one block each, and the block sums are added left to right. The host does not wait for the device:
lists are allocated for the worst case, and `counts` holds their used lengths.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl

from thermocline.kernels.launch import blocks, kernel

BLOCK = 64
"""Number of occurrences per block of a sum of gradients."""

_TILE = 512


@dataclasses.dataclass(slots=True, eq=False)
class Segments:
    """Ids grouped by slot: int32 lists in device memory."""

    order: torch.Tensor
    """[ids]: positions of ids, grouped by slot, ascending within a slot."""
    slots: torch.Tensor
    """[<= ids]: the slot of each segment, ascending."""
    starts: torch.Tensor
    """[<= ids + 1]: segment u is order[starts[u] : starts[u + 1]]."""
    hot: torch.Tensor
    """Numbers of the hot segments, ascending."""
    hot_blocks: torch.Tensor
    """Hot segment h has blocks hot_blocks[h] to hot_blocks[h + 1]."""
    block_starts: torch.Tensor
    """First index in `order` of each block of a hot segment."""
    block_ends: torch.Tensor
    counts: torch.Tensor
    """[3]: number of segments, of hot segments, and of blocks of hot segments."""
    sizes: tuple[int, int, int]
    """Upper bounds of `counts` on the host; exact in the result of `known`."""

    @property
    def ids(self) -> int:
        return len(self.order)

    def known(self, segments: int, hot: int, blocks: int) -> Segments:
        """Copy with exact `sizes`, which the caller has read from `counts`: later launches use smaller grids."""
        return dataclasses.replace(self, sizes=(segments, hot, blocks))


def capacities(ids: int) -> tuple[int, int, int]:
    """Largest possible number of segments, hot segments and blocks of hot segments of `ids` ids."""
    hot = ids // (BLOCK + 1)
    return ids, hot, ids // BLOCK + hot


@triton.jit
def prefix_sum(counts, end, TILE: tl.constexpr):
    """int32: the sum of counts[:end]."""
    total = tl.zeros([TILE], tl.int32)
    for first in range(0, end, TILE):
        i = first + tl.arange(0, TILE)
        total += tl.load(counts + i, mask=i < end, other=0)
    return tl.sum(total)


@triton.jit
def _heads(slots, i, ids, rounds, BLOCK: tl.constexpr):
    """Per index `i` into the sorted slots: its slot, whether a segment starts there, and its blocks if it is hot."""
    live = i < ids
    slot = tl.load(slots + i, mask=live, other=-1)
    left = tl.load(slots + i - 1, mask=live & (i > 0), other=-1)
    head = live & ((i == 0) | (slot != left))
    # A segment is hot if the same slot follows BLOCK elements later. Tiles with hot segments search for their ends.
    later = tl.load(slots + i + BLOCK, mask=head & (i + BLOCK < ids), other=-1)
    hot = head & (i + BLOCK < ids) & (later == slot)
    low = i + BLOCK  # inside the segment, if it is hot
    high = tl.where(hot, ids, low + 1)  # past the segment
    if tl.max(hot.to(tl.int32)) > 0:
        for _ in range(rounds):
            search = high - low > 1
            middle = low + (high - low) // 2
            same = tl.load(slots + middle, mask=search, other=-1) == slot
            low = tl.where(search & same, middle, low)
            high = tl.where(search & (same == 0), middle, high)
    return slot, head, tl.where(hot, (high - i + BLOCK - 1) // BLOCK, 0)


@kernel(do_not_specialize=["ids", "tiles", "rounds"])
def _count_kernel(slots, tile_counts, ids, tiles, rounds, BLOCK: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0)
    _, head, blocks = _heads(slots, tile * TILE + tl.arange(0, TILE), ids, rounds, BLOCK)
    tl.store(tile_counts + tile, tl.sum(head.to(tl.int32)))
    tl.store(tile_counts + tiles + tile, tl.sum((blocks > 0).to(tl.int32)))
    tl.store(tile_counts + 2 * tiles + tile, tl.sum(blocks))


@kernel(do_not_specialize=["ids", "tiles", "rounds"])
def _write_kernel(
    sorted_slots, positions, tile_counts, order, slots, starts, hot, hot_blocks, counts, ids, tiles, rounds,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    i = tile * TILE + tl.arange(0, TILE)
    live = i < ids
    tl.store(order + i, tl.load(positions + i, mask=live, other=0).to(tl.int32), mask=live)
    slot, head, blocks = _heads(sorted_slots, i, ids, rounds, BLOCK)
    first = prefix_sum(tile_counts, tile, TILE)
    first_hot = prefix_sum(tile_counts + tiles, tile, TILE)
    first_block = prefix_sum(tile_counts + 2 * tiles, tile, TILE)
    segment = first + tl.cumsum(head.to(tl.int32)) - 1
    tl.store(slots + segment, slot, mask=head)
    tl.store(starts + segment, i, mask=head)
    is_hot = blocks > 0
    nth_hot = first_hot + tl.cumsum(is_hot.to(tl.int32)) - 1
    block = first_block + tl.cumsum(blocks) - blocks
    tl.store(hot + nth_hot, segment, mask=is_hot)
    tl.store(hot_blocks + nth_hot, block, mask=is_hot)
    if tile == tiles - 1:
        segments = first + tl.sum(head.to(tl.int32))
        num_hot = first_hot + tl.sum(is_hot.to(tl.int32))
        num_blocks = first_block + tl.sum(blocks)
        tl.store(starts + segments, ids)
        tl.store(hot_blocks + num_hot, num_blocks)
        tl.store(counts, segments)
        tl.store(counts + 1, num_hot)
        tl.store(counts + 2, num_blocks)


@kernel(do_not_specialize=["rounds"])
def _blocks_kernel(
    starts, hot, hot_blocks, block_starts, block_ends, counts, rounds, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    num_hot = tl.load(counts + 1)
    num_blocks = tl.load(counts + 2)
    first = tl.program_id(0) * TILE
    if first < num_blocks:
        block = first + tl.arange(0, TILE)
        live = block < num_blocks
        low = tl.zeros([TILE], tl.int32)  # the last hot segment that starts at or before this block
        high = low + num_hot
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


@functools.lru_cache(256)
def _list_sizes(ids: int) -> list[int]:
    """Elements of the lists of `ids` ids, and of the counts per tile. Each list is aligned to 16 bytes, because Triton
    compiles another kernel for pointers that are not."""
    segments, hot, hot_blocks = capacities(ids)
    sizes = [ids, segments, segments + 1, hot, hot + 1, hot_blocks, hot_blocks, 3, 3 * blocks(ids, _TILE)]
    return [-(-size // 4) * 4 for size in sizes]


def segment_words(capacity: int) -> int:
    """Number of int32 words that `find_segments` needs for at most `capacity` ids."""
    return sum(_list_sizes(capacity))


def segment_views(memory: torch.Tensor, capacity: int, ids: int) -> Segments:
    """Return the lists in int32[segment_words(capacity)] without computing them; `sizes` are bounds for `ids` ids."""
    lists = torch.split(memory, _list_sizes(capacity))
    return Segments(
        order=lists[0][:ids], slots=lists[1], starts=lists[2], hot=lists[3], hot_blocks=lists[4],
        block_starts=lists[5], block_ends=lists[6], counts=lists[7][:3], sizes=capacities(ids),
    )  # fmt: skip


def find_segments(slots: torch.Tensor, memory: torch.Tensor | None = None, capacity: int | None = None) -> Segments:
    """Group ids by slot: `slots` is int32[ids], at least -1. `sizes` of the result are upper bounds.

    memory     int32[segment_words(capacity)] for the lists; allocated if None
    capacity   largest number of ids that the lists have room for; by default the number of ids
    """
    if slots.dtype != torch.int32 or slots.dim() != 1 or not slots.is_contiguous():
        raise ValueError(f"slots are {slots.dtype}{list(slots.shape)}: must be contiguous int32[ids]")
    ids = len(slots)
    room = ids if capacity is None else capacity
    if memory is None:  # one allocation, because nine would take longer than the kernels
        memory = torch.empty(segment_words(room), dtype=torch.int32, device=slots.device)
    result, tiles = segment_views(memory, room, ids), blocks(ids, _TILE)
    _, hot, hot_blocks = result.sizes
    if ids == 0:
        for ends in (result.starts, result.hot_blocks, result.counts):
            ends.zero_()
        return result
    values, positions = torch.sort(slots, stable=True)
    tile_counts = memory[segment_words(room) - _list_sizes(room)[-1] :]
    sizes = [ids, tiles, ids.bit_length()]
    starts, hot_segments = result.starts, (result.hot, result.hot_blocks)
    _count_kernel[(tiles,)](values, tile_counts, *sizes, BLOCK=BLOCK, TILE=_TILE)
    _write_kernel[(tiles,)](
        values, positions, tile_counts, result.order, result.slots, starts, *hot_segments, result.counts, *sizes,
        BLOCK=BLOCK, TILE=_TILE,
    )  # fmt: skip
    if hot:
        _blocks_kernel[(blocks(hot_blocks, _TILE),)](
            starts, *hot_segments, result.block_starts, result.block_ends, result.counts, hot.bit_length(),
            BLOCK=BLOCK, TILE=_TILE,
        )  # fmt: skip
    return result


def find_segments_reference(slots: torch.Tensor) -> Segments:
    """`find_segments` in plain torch, with lists of exact length."""
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
    exact_sizes = (len(unique), len(hot), len(owner))
    counts = torch.tensor(exact_sizes, device=slots.device)
    parts = [order, unique, starts, hot, firsts, block_starts, block_ends, counts]
    order, unique, starts, hot, firsts, block_starts, block_ends, counts = (part.to(torch.int32) for part in parts)
    return Segments(order, unique, starts, hot, firsts, block_starts, block_ends, counts, exact_sizes)
