"""Types of the C++ module (csrc/bind)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

class StoreOptions:
    row_bytes: int
    create: bool
    read_only: bool
    epoch: int | None
    mem_budget: int
    max_log_ratio: float
    filter_bits: int
    write_buffer: int
    segment_bytes: int
    partition_bytes: int
    min_log_bytes: int
    background_merge: bool

    def __init__(self) -> None: ...

class RowStore:
    @property
    def row_bytes(self) -> int: ...

class Scan:
    def next(self, keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.uint8]) -> int: ...

class SsdStore(RowStore):
    @staticmethod
    def open(path: bytes, options: StoreOptions, io_engine: str, io_workers: int, io_depth: int) -> SsdStore: ...
    def get(self, keys: npt.NDArray[np.uint64], found: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8]) -> None: ...
    def put(self, keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.uint8]) -> None: ...
    def erase(self, keys: npt.NDArray[np.uint64]) -> None: ...
    def commit(self, note: bytes) -> int: ...
    def epoch(self) -> int: ...
    def note(self) -> bytes: ...
    def epochs(self) -> list[int]: ...
    def release(self, epoch: int) -> None: ...
    def scan(self) -> Scan: ...
    def count(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def read_floor(self, keys: npt.NDArray[np.uint64]) -> float: ...
    def check(self) -> None: ...
    def merge_all(self) -> None: ...
    def link_checkpoint(self, path: bytes) -> None: ...
    def close(self) -> None: ...

_Keys = npt.NDArray[np.uint64]
_Slots = npt.NDArray[np.uint32]
_Floats = npt.NDArray[np.float32]
_Offsets = npt.NDArray[np.int64]

class Dedup:
    def __init__(self, threads: int) -> None: ...
    def run(self, ids: _Keys) -> tuple[_Keys, _Slots, _Slots, _Slots]: ...

class Step: ...

def make_step(
    optimizer: int, lr: float, eps: float, weight_decay: float, beta1: float, beta2: float, t: int, scale: float
) -> Step: ...

class Pins:
    def __init__(self, tier: MemTier, keys: _Keys) -> None: ...
    def slots(self) -> _Slots: ...
    def hold(self) -> bool: ...
    def let_go(self) -> None: ...

class MemTier:
    def __init__(
        self,
        dim: int,
        optimizer: int,
        budget: int,
        policy: int,
        threads: int,
        shards: int,
        seed: int,
        table: int,
        initial_kind: int,
        initial_scale: float,
        initial_state: float,
        store: RowStore | None,
    ) -> None: ...
    def pull(self, keys: _Keys, slots: _Slots) -> None: ...
    def unpin(self, slots: _Slots, dirty: bool, keys: _Keys | None) -> None: ...
    def mark_dirty(self, slots: _Slots) -> None: ...
    def dirty_rows(self, next: int, keys: _Keys, rows: _Floats) -> tuple[int, int]: ...
    def read(self, keys: _Keys, rows: _Floats) -> None: ...
    def push(self, keys: _Keys, rows: _Floats, dirty: bool, unique: bool = False) -> None: ...
    def copy_out(self, slots: _Slots, rows: _Floats) -> None: ...
    def write(self, slots: _Slots, rows: _Floats) -> None: ...
    def flush(self, to: RowStore | None) -> None: ...
    def make_room(self, rows: int) -> None: ...
    def check(self, idle: bool) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def initial_rows(self, keys: _Keys, rows: _Floats) -> None: ...
    def plan(
        self,
        slots: _Slots,
        inverse: _Slots,
        order: _Slots,
        offsets: _Offsets | None,
        weights: _Floats | None,
        mean: bool,
    ) -> tuple[_Slots, _Slots, _Floats | None]: ...
    def pool(
        self, slots: _Slots, offsets: _Offsets | None, weights: _Floats | None, mean: bool, out: _Floats
    ) -> None: ...
    def pool_buffer(
        self,
        rows: _Floats,
        index: _Slots,
        offsets: _Offsets | None,
        weights: _Floats | None,
        mean: bool,
        out: _Floats,
    ) -> None: ...
    def update(
        self, slots: _Slots, starts: _Slots, grad_rows: _Slots, coefs: _Floats | None, grads: _Floats, step: Step
    ) -> None: ...
    def sum_gradients(
        self, starts: _Slots, grad_rows: _Slots, coefs: _Floats | None, grads: _Floats, sums: _Floats
    ) -> None: ...
    def apply_gradients(self, slots: _Slots, sums: _Floats, step: Step) -> None: ...
    @property
    def capacity(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...

class Synth:
    def __init__(
        self,
        seed: int,
        keys: list[int],
        exponents: list[float],
        min_ids: int,
        max_ids: int,
        dense: int,
        base_rate: float,
        signal: float,
        label_noise: float,
        threads: int,
    ) -> None: ...
    def generate(self, first: int, examples: int) -> tuple[_Keys, _Offsets, _Floats, _Floats, _Floats]: ...
    def key_of(self, field: int, rank: int) -> int: ...

def to_text(ids: _Keys, offsets: _Offsets, fields: int, labels: _Floats, with_fields: bool) -> bytes: ...

# Readers of files (csrc/data/parse.h says what each format accepts). All calls release the GIL and may run at once.
_Doubles = npt.NDArray[np.float64]
_Mask = npt.NDArray[np.bool_]
# Role "label", "key", "dense", "number_key" or "ignore"; name; then for numbers: log, mean, inverse deviation, and the
# bucket: a width, "log_square" or "none".
_Column = tuple[str, str, bool, float, float, float | str]
# ids, offsets [examples * fields + 1], weights (None: all are 1), dense [examples * dense], labels, the first malformed
# lines (number in the block from 0, empty lines counted; cause), how many lines were malformed.
_Parsed = tuple[_Keys, _Offsets, _Floats | None, _Floats, _Floats, list[tuple[int, str]], int]
# ids, offsets, weights, dense, labels: the first five of _Parsed.
_Examples = tuple[_Keys, _Offsets, _Floats | None, _Floats, _Floats]

class TextParser:
    def __init__(
        self,
        kind: str,  # "libsvm", "libffm" or "table"
        *,
        delimiter: str = "\t",  # table: one byte
        quoting: bool = False,  # table: fields may be "quoted, with ""quotes"" inside"; no line breaks inside
        columns: Sequence[_Column] = (),  # table: all of them, in file order
        fields: int = 0,  # libsvm by position, libffm; a table's: its "key" and "number_key" columns, in order
        one_bag: bool = False,  # libsvm: a line is one bag of field "0"
        raw_keys: bool = False,  # values are decimal 64-bit keys, taken as they are
    ) -> None: ...
    # `block`: whole lines. skip_errors: malformed lines are left out (at most 16 are described, all are counted);
    # otherwise parsing ends at the first one, which is described, with the examples before it.
    def parse(self, block: Buffer, skip_errors: bool) -> _Parsed: ...
    @property
    def fields(self) -> int: ...
    @property
    def dense(self) -> int: ...

# The key of one value: xxh64(value, seed = xxh64(field, 0)).
def key_of(field: str, value: bytes) -> int: ...

# Arrow columns: the keys that a text file with the same values gives. `valid`: a bool per value, None: all are;
# what is not valid, and NaN, is the empty value "". Offsets may begin anywhere in `data` (slices).
def hash_strings(
    field: str,
    offsets: npt.NDArray[np.int32] | npt.NDArray[np.int64],
    data: npt.NDArray[np.uint8],
    valid: _Mask | None = None,
) -> _Keys: ...
def hash_ints(
    field: str, values: npt.NDArray[np.int64] | npt.NDArray[np.uint64], valid: _Mask | None = None
) -> _Keys: ...
def hash_floats(field: str, values: _Doubles | _Floats, valid: _Mask | None = None) -> _Keys: ...

# Numbers as a table's "dense" and "number_key" columns treat them. Missing: 0 and the key of "". Infinity raises.
def number_dense(
    values: _Doubles, valid: _Mask | None, log: bool, mean: float, inverse_deviation: float
) -> _Floats: ...
def number_keys(
    field: str,
    values: _Doubles,
    valid: _Mask | None,
    log: bool,
    mean: float,
    inverse_deviation: float,
    bucket: float | str,
) -> _Keys: ...

# Examples by their numbers in the concatenation of `blocks`: shuffling and cutting into batches. There are weights when
# any block has some.
def gather_examples(
    blocks: Sequence[_Examples], fields: int, dense: int, order: npt.NDArray[np.int64]
) -> _Examples: ...
