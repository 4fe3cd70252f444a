"""The index of a GPU table: open addressing over blocks of five entries, any 64-bit key to the slot of its row.

A block is 64 bytes, half a cache line: int64 keys[5], int32 slots[5], 4 bytes unused. A search reads whole blocks: the
key's home, then every so many blocks further, a power of two that the key's hash chooses (their number is odd, so it
meets all); it ends at the key or at a block with an empty entry. So an entry may become empty again only in a
block that has another empty one; in a full block a removed key stays, without a slot, until it comes back or `rebuild`.

All 2^64 keys are legal. The one that marks empty entries is kept under another name in a block of its own, the last.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from thermocline.kernels import INTERPRETED
from thermocline.kernels.random import mix64

ENTRIES = 5
"""Of one block."""
BLOCK_BYTES = 64
EMPTY_KEY = 0x6A09E667F3BCC909
"""Marks an empty entry."""

WIDTH = tl.constexpr(ENTRIES)
EMPTY = tl.constexpr(EMPTY_KEY)
TWIN = tl.constexpr(EMPTY_KEY ^ 1)  # what the marker's own key is called in the last block
ABSENT = tl.constexpr(-(2**31))  # the slot of a key that has none
SALT = tl.constexpr(0x2545F4914F6CDD1D)  # so that no other tier's hash is like this one
NATIVE = tl.constexpr(not INTERPRETED)

_ABSENT = -(2**31)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The memory of an index. Ops change it; whoever calls them keeps count of what is in it."""

    words: torch.Tensor
    """int64[(blocks + 1) * 8]."""
    blocks: int
    """Those of all keys but the marker."""

    @classmethod
    def empty(cls, entries: int, device: torch.device | str) -> Index:
        """Room for `entries` keys, rounded up to whole blocks. Search is fast while at most 0.9 of it is in use."""
        blocks = _blocks_for(entries)
        if blocks >= 2**31:
            raise ValueError(f"an index of {entries} entries: at most {ENTRIES * (2**31 - 1)}")
        index = cls(torch.empty((blocks + 1) * 8, dtype=torch.int64, device=device), blocks)
        index.clear()
        return index

    def clear(self) -> None:
        """Forgets every key."""
        self.words.view(-1, 8)[:, :ENTRIES] = EMPTY_KEY
        self.halves.view(-1, 16)[:, 2 * ENTRIES :] = _ABSENT

    @property
    def strides(self) -> int:
        """How many strides searches choose from; all are shorter than the index."""
        return max(1, min(16, (self.blocks - 1).bit_length()))

    @property
    def entries(self) -> int:
        """How many keys it can hold at most."""
        return self.blocks * ENTRIES

    @property
    def halves(self) -> torch.Tensor:
        """The same memory as int32: slot j of block b is element 16 b + 2 ENTRIES + j."""
        return self.words.view(torch.int32)

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """What kernels take of it: words, halves, blocks, strides."""
        return self.words, self.halves, self.blocks, self.strides

    @staticmethod
    def bytes_for(entries: int) -> int:
        """Memory of an index with room for `entries`."""
        return (_blocks_for(entries) + 1) * BLOCK_BYTES


def _blocks_for(entries: int) -> int:
    return max(1, -(-entries // ENTRIES)) | 1


# ---- parts of kernels; all tensors are one-dimensional, a comm per key


@triton.jit
def home(key, blocks, strides):
    """Under which name a key is kept, in which block its search begins, and how many blocks further it goes on."""
    marker = key == EMPTY
    mix = mix64((key ^ SALT).to(tl.uint64, bitcast=True))
    block = (((mix >> 32) * blocks) >> 32).to(tl.int64)
    stride = (tl.zeros_like(mix) + 1) << (((mix & 0xFFFF) * strides) >> 16)
    return tl.where(marker, TWIN, key), tl.where(marker, tl.zeros_like(block) + blocks, block), stride.to(tl.int64)


@triton.jit
def next_block(block, stride, blocks):
    """Where a search goes on."""
    onward = block + stride
    return tl.where(onward >= blocks, onward - blocks, onward)


@triton.jit
def slot_of(block, number):
    """Where an entry's slot is among the halves."""
    return block * 16 + 2 * WIDTH + number


@triton.jit
def look(words, block, name, active, FRESH: tl.constexpr):
    """One block: the number of the entry that holds `name`, and of the first empty one; WIDTH where there is none.

    FRESH: past the L1 cache, for kernels that change the index as they go.
    """
    at = tl.full(name.shape, WIDTH, tl.int32)
    vacant = tl.full(name.shape, WIDTH, tl.int32)
    for back in tl.static_range(WIDTH):
        pointer = words + block * 8 + (WIDTH - 1 - back)
        if FRESH:
            key = tl.load(pointer, mask=active, other=0, cache_modifier=".cg")
        else:
            key = tl.load(pointer, mask=active, other=0)
        at = tl.where(key == name, WIDTH - 1 - back, at)
        vacant = tl.where(key == EMPTY, WIDTH - 1 - back, vacant)
    return at, vacant


@triton.jit
def search(words, halves, key, active, blocks, strides):
    """The slot of every key, negative where it has none; the index does not change meanwhile."""
    name, block, stride = home(key, blocks, strides)
    slot = tl.full(key.shape, ABSENT, tl.int32)
    left = blocks + 1  # an index without any empty entry would never end a search
    while (tl.max(active.to(tl.int32), 0) > 0) & (left > 0):
        at, vacant = look(words, block, name, active, False)
        hit = active & (at < WIDTH)
        slot = tl.where(hit, tl.load(halves + slot_of(block, at), mask=hit, other=0), slot)
        active = active & (at == WIDTH) & (vacant == WIDTH)
        block = next_block(block, stride, blocks)
        left -= 1
    return slot


@triton.jit
def compare_and_swap(pointer, parked, compare, value, mask):
    """64-bit compare-and-swap where `mask`; what was there before. `parked`: a private word per comm, for idle comms.

    Triton's atomic_cas takes no mask, and idle comms parked on memory cost as much as busy ones: on a GPU the
    instruction is predicated instead. One thread per comm: the tensors must not be smaller than the program's threads.
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
def _claim_step(words, parked, name, block, stride, blocks, active, found, number, took, FRESH: tl.constexpr):
    """One block of every search that is not done."""
    # Entries only fill while this runs, and everyone takes the first empty one: so a key cannot enter twice.
    at, vacant = look(words, block, name, active, FRESH)
    wants = active & (at == WIDTH) & (vacant < WIDTH)
    empty = tl.full(name.shape, EMPTY, tl.int64)
    old = compare_and_swap(words + block * 8 + vacant, parked, empty, name, wants)
    won = wants & (old == EMPTY)
    done = won | (active & (at < WIDTH)) | (wants & (old == name))
    found = tl.where(done, block, found)
    number = tl.where(done, tl.where(at < WIDTH, at, vacant), number)
    onward = active & (at == WIDTH) & (vacant == WIDTH)
    block = tl.where(onward, next_block(block, stride, blocks), block)
    return block, active & ~done, found, number, took | won


@triton.jit
def claim(words, parked, key, active, blocks, strides):
    """An entry for every key: the one that has it, or the first empty one, taken. Lanes may share a key.

    Gives the entry's block and number, and whether this comm took it; block -1 where the index has no room.
    """
    name, block, stride = home(key, blocks, strides)
    found = tl.full(key.shape, -1, tl.int64)
    number = tl.zeros(key.shape, tl.int32)
    took = active & False
    # The first look may go through the L1 cache: there an entry can look empty that is taken by now, never the reverse.
    block, active, found, number, took = _claim_step(
        words, parked, name, block, stride, blocks, active, found, number, took, False
    )
    left = 8 * (blocks + 1)
    while (tl.max(active.to(tl.int32), 0) > 0) & (left > 0):
        block, active, found, number, took = _claim_step(
            words, parked, name, block, stride, blocks, active, found, number, took, True
        )
        left -= 1
    return found, number, took
