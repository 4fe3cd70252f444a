"""Index of a GPU table: an open-addressing hash table from 64-bit keys to slots, in blocks of five entries.

A block is 64 bytes, half a cache line: int64 keys[5], int32 slots[5], 4 bytes unused. A search starts at the home block
of the key and continues with a stride, a power of two chosen by the hash; the number of blocks is odd, so a search
visits all of them. It ends at the key or at a block with an empty entry. Therefore an entry can be emptied only if its
block has another empty entry. In a full block a removed key remains, without a slot, until it is inserted again or
`rebuild` runs.

All 2^64 keys are legal. EMPTY_KEY itself is stored under an alias in the last block, which holds no other key.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from thermocline.kernels import INTERPRETED
from thermocline.kernels.random import mix64

ENTRIES = 5
"""Entries per block."""
BLOCK_BYTES = 64
EMPTY_KEY = 0x6A09E667F3BCC909
"""Key of an empty entry."""

WIDTH = tl.constexpr(ENTRIES)
EMPTY = tl.constexpr(EMPTY_KEY)
ALIAS = tl.constexpr(EMPTY_KEY ^ 1)  # stands for EMPTY_KEY in the last block
ABSENT = tl.constexpr(-(2**31))  # slot of a key without a row
SALT = tl.constexpr(0x2545F4914F6CDD1D)  # makes this hash independent of those of other tiers
NATIVE = tl.constexpr(not INTERPRETED)

_ABSENT = -(2**31)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Index:
    """Memory of an index. Kernels change it; the caller counts its occupied entries."""

    words: torch.Tensor
    """int64[(blocks + 1) * 8]."""
    blocks: int
    """Number of blocks, without the last one."""

    @classmethod
    def empty(cls, entries: int, device: torch.device | str) -> Index:
        """Empty index of at least `entries` entries. Searches are fast while at most 0.9 of them are occupied."""
        blocks = _blocks_for(entries)
        if blocks >= 2**31:
            raise ValueError(f"entries is {entries}: an index has at most {ENTRIES * (2**31 - 1)}")
        index = cls(torch.empty((blocks + 1) * 8, dtype=torch.int64, device=device), blocks)
        index.clear()
        return index

    def clear(self) -> None:
        """Remove all keys."""
        self.words.view(-1, 8)[:, :ENTRIES] = EMPTY_KEY
        self.halves.view(-1, 16)[:, 2 * ENTRIES :] = _ABSENT

    @property
    def strides(self) -> int:
        """Number of different strides of searches; all are shorter than the index."""
        return max(1, min(16, (self.blocks - 1).bit_length()))

    @property
    def entries(self) -> int:
        """Largest number of keys."""
        return self.blocks * ENTRIES

    @property
    def halves(self) -> torch.Tensor:
        """`words` as int32: slot j of block b is element 16 b + 2 ENTRIES + j."""
        return self.words.view(torch.int32)

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Arguments of kernels: words, halves, blocks, strides."""
        return self.words, self.halves, self.blocks, self.strides

    @staticmethod
    def bytes_for(entries: int) -> int:
        """Bytes of an index of `entries` entries."""
        return (_blocks_for(entries) + 1) * BLOCK_BYTES


def _blocks_for(entries: int) -> int:
    return max(1, -(-entries // ENTRIES)) | 1


# ---- device functions; tensors are one-dimensional, with one lane per key


@triton.jit
def home_block(key, blocks, strides):
    """The stored form of each key, the first block of its search, and its stride in blocks."""
    marker = key == EMPTY
    mix = mix64((key ^ SALT).to(tl.uint64, bitcast=True))
    block = (((mix >> 32) * blocks) >> 32).to(tl.int64)
    stride = (tl.zeros_like(mix) + 1) << (((mix & 0xFFFF) * strides) >> 16)
    return tl.where(marker, ALIAS, key), tl.where(marker, tl.zeros_like(block) + blocks, block), stride.to(tl.int64)


@triton.jit
def next_block(block, stride, blocks):
    """Block after `block` in a search."""
    following = block + stride
    return tl.where(following >= blocks, following - blocks, following)


@triton.jit
def slot_offset(block, entry):
    """Element of `halves` that holds the slot of an entry."""
    return block * 16 + 2 * WIDTH + entry


@triton.jit
def probe(words, block, stored, active, FRESH: tl.constexpr):
    """Read one block: the entry that holds `stored`, and the first empty entry; WIDTH if there is none.

    FRESH bypasses the L1 cache, for kernels that change the index while they run.
    """
    at = tl.full(stored.shape, WIDTH, tl.int32)
    vacant = tl.full(stored.shape, WIDTH, tl.int32)
    for back in tl.static_range(WIDTH):
        pointer = words + block * 8 + (WIDTH - 1 - back)
        if FRESH:
            key = tl.load(pointer, mask=active, other=0, cache_modifier=".cg")
        else:
            key = tl.load(pointer, mask=active, other=0)
        at = tl.where(key == stored, WIDTH - 1 - back, at)
        vacant = tl.where(key == EMPTY, WIDTH - 1 - back, vacant)
    return at, vacant


@triton.jit
def search(words, halves, key, active, blocks, strides):
    """int32: the slot of every key, negative if it has none. The index must not change meanwhile."""
    stored, block, stride = home_block(key, blocks, strides)
    slot = tl.full(key.shape, ABSENT, tl.int32)
    left = blocks + 1  # bounds the search in an index without empty entries
    while (tl.max(active.to(tl.int32), 0) > 0) & (left > 0):
        at, vacant = probe(words, block, stored, active, False)
        hit = active & (at < WIDTH)
        slot = tl.where(hit, tl.load(halves + slot_offset(block, at), mask=hit, other=0), slot)
        active = active & (at == WIDTH) & (vacant == WIDTH)
        block = next_block(block, stride, blocks)
        left -= 1
    return slot


@triton.jit
def compare_and_swap(pointer, parked, compare, value, mask):
    """64-bit compare-and-swap where `mask`; returns the old values.

    Triton's atomic_cas takes no mask. On a GPU the instruction is predicated by inline assembly, which needs one thread
    per lane: the tensors must not be smaller than the program's threads. Interpreted, idle lanes swap `parked`, one
    private word per lane.
    """
    if NATIVE:
        old = tl.inline_asm_elementwise(
            """{
                .reg .pred p;
                .reg .b64 old;
                setp.ne.b32 p, $4, 0;
                mov.b64 old, $2;
                @p atom.global.relaxed.gpu.cas.b64 old, [$1], $2, $3;
                mov.b64 $0, old;
            }""",
            "=l,l,l,l,r",
            [pointer.to(tl.int64), compare, value, mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        old = tl.atomic_cas(tl.where(mask, pointer, parked), compare, value)
    return old


@triton.jit
def _claim_step(words, parked, stored, block, stride, blocks, active, found, entry, claimed, FRESH: tl.constexpr):
    """Advance every active search by one block."""
    # Entries are only filled while this runs, and every lane claims the first empty one: no key is inserted twice.
    at, vacant = probe(words, block, stored, active, FRESH)
    attempt = active & (at == WIDTH) & (vacant < WIDTH)
    empty = tl.full(stored.shape, EMPTY, tl.int64)
    old = compare_and_swap(words + block * 8 + vacant, parked, empty, stored, attempt)
    won = attempt & (old == EMPTY)
    done = won | (active & (at < WIDTH)) | (attempt & (old == stored))
    found = tl.where(done, block, found)
    entry = tl.where(done, tl.where(at < WIDTH, at, vacant), entry)
    continues = active & (at == WIDTH) & (vacant == WIDTH)
    block = tl.where(continues, next_block(block, stride, blocks), block)
    return block, active & ~done, found, entry, claimed | won


@triton.jit
def claim(words, parked, key, active, blocks, strides):
    """Find the entry of every key, or claim the first empty one. Several lanes may have the same key.

    Returns the block, the entry in the block, and whether this lane claimed it; block -1 if the index is full.
    """
    stored, block, stride = home_block(key, blocks, strides)
    found = tl.full(key.shape, -1, tl.int64)
    entry = tl.zeros(key.shape, tl.int32)
    claimed = active & False
    # The first probe may use the L1 cache: a stale entry can appear empty although it is claimed, never the reverse.
    block, active, found, entry, claimed = _claim_step(
        words, parked, stored, block, stride, blocks, active, found, entry, claimed, False
    )
    left = 8 * (blocks + 1)
    while (tl.max(active.to(tl.int32), 0) > 0) & (left > 0):
        block, active, found, entry, claimed = _claim_step(
            words, parked, stored, block, stride, blocks, active, found, entry, claimed, True
        )
        left -= 1
    return found, entry, claimed
