"""`PlanGraph`: the planning of a window as one recording: slots of all ids, then all lists of every batch.

Windows of equal shape, with the same number of ids in every bag, share a recording. Its inputs lie in one block: a
header, the keys, then offsets and weights of the bags. All but the header is brought to the device by one copy; ids in
page-locked memory are copied from where they are; many ids are copied ahead, while earlier windows are planned. Its
outputs are copied out after each replay, into memory that a window owns until its pins are released; then a later
window uses the memory again, with all views and launches that were made for it. Windows of other shapes are planned by
the same functions without a recording.

After some windows without a new key, a recording that inserts nothing is tried first (`find_resident`). If it finds
that a key is not resident, the window is planned again.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from thermocline.embedding.batch_plan import BagInput, BagInputs
from thermocline.kernels.evict import COUNTS, LOST, NEW
from thermocline.kernels.find_resident import find_resident
from thermocline.kernels.insert import InsertPlan, find_or_insert
from thermocline.kernels.rows import copy_in
from thermocline.tiers.hbm import Assigned, HbmTier, StagedIds
from thermocline.tiers.hbm_plan import PlanLists, write_plan
from thermocline.tiers.plan_layout import BagLayout, Capacities, PlanLayout
from thermocline.utils.page_locked import fixed_words, is_page_locked
from thermocline.utils.recording import Recording, current_stream

HEADER = 4
"""Words of the header: slots in use, number of the window, newest completed window, unused."""
_EVENTS = 16
"""Windows of one shape in flight, each with an event of its own; with more, training waits longer than it must."""
_SPARE_LISTS = 2
"""Lists of a shape beyond those of windows in flight, allocated so that planning need not wait for training."""
_RESIDENT_WINDOWS = 4
"""Windows in a row without a new key, after which the next is expected to have none."""
_MAX_GRAPHS = 4
_MAX_SHAPES = 256
_DIRECT_IDS = 1 << 13
"""Least mean number of ids per bag for an upload of their own: a launch takes about as long as a copy of 64 KB."""

_IDS_AHEAD = 1 << 18
"""Least number of ids of a window for an upload before its plan is launched: shorter uploads take less time than memory
and events of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class WindowShape:
    """Layouts and numbers of ids of all batches of a window."""

    layouts: tuple[PlanLayout, ...]
    ids: tuple[tuple[int, ...], ...]
    """Per batch and bag."""

    @property
    def keys(self) -> int:
        """Number of ids of the window."""
        return sum(map(sum, self.ids))

    def input_sizes(self) -> list[int]:
        """Sizes of the parts of the block after header and keys, in 64-bit words: offsets and weights of each bag."""
        sizes = []
        for layout, ids in zip(self.layouts, self.ids, strict=True):
            for bag, count in zip(layout.bags, ids, strict=True):
                sizes += [0 if bag.bags is None else bag.bags + 1, bag.weighted * -(-count // 2)]
        return sizes

    @property
    def words(self) -> int:
        """Size of the block in 64-bit words."""
        return HEADER + self.keys + sum(self.input_sizes())


class WindowShapes:
    """Shapes of the windows of one table. Any thread."""

    def __init__(self) -> None:
        self._capacities = Capacities()
        self._known: dict[Any, tuple[int, WindowShape]] = {}

    def of(self, inputs: Sequence[BagInputs]) -> WindowShape:
        """Return the shape of a window with these batches: the same object for equal sizes, as long as no capacity
        grows."""
        sizes = tuple([tuple([_sizes(source) for source in batch.values()]) for batch in inputs])
        version = self._capacities.version
        known, shape = self._known.get(sizes, (-1, None))
        if shape is None or known != version:
            if len(self._known) >= _MAX_SHAPES:
                self._known.clear()
            shape = self._shape_of(inputs)
            self._known[sizes] = version, shape
        return shape

    def _shape_of(self, inputs: Sequence[BagInputs]) -> WindowShape:
        layouts, ids = [], []
        for batch in inputs:
            sources = batch.values()
            layouts.append(self._capacities.layout([_bag_layout(source) for source in sources]))
            ids.append(tuple(len(source.ids) for source in sources))
        return WindowShape(tuple(layouts), tuple(ids))


def _sizes(source: BagInput) -> tuple[int, int, bool, bool]:
    """Return what the shape of a window depends on."""
    offsets = source.offsets
    return len(source.ids), -1 if offsets is None else len(offsets), source.weights is not None, source.mean


def _bag_layout(source: BagInput) -> BagLayout:
    bags = None if source.offsets is None else source.bags
    return BagLayout(len(source.ids), bags, source.weights is not None, source.mean and bags is not None)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Lists:
    """Lists of all batches of a window, in one allocation."""

    memory: torch.Tensor
    batches: list[PlanLists]
    uses: dict[int, torch.cuda.Event] = dataclasses.field(default_factory=dict)
    """Per training stream: recorded after the last use of the lists."""

    @property
    def in_use(self) -> bool:
        """Whether training still reads the lists of a released window."""
        return not all(event.query() for event in self.uses.values())  # type: ignore[no-untyped-call]


class _Kind(enum.Enum):
    """Treatment of the keys of a window by a recording."""

    FIND = enum.auto()
    """Finds them; counts[NEW] is the number of ids that are not resident."""
    INSERT = enum.auto()
    """Inserts missing keys into unused slots."""
    EVICT = enum.auto()
    """Inserts missing keys, and evicts others if slots are missing."""


class PlanGraph:
    """The recorded planning of all windows of one shape. Called under the lock of the tier, on its planning stream."""

    def __init__(self, tier: HbmTier, shape: WindowShape) -> None:
        self.shape = shape
        self._tier = tier
        self._cuda = tier.device.type == "cuda"
        self._keys = shape.keys
        self._header = fixed_words(HEADER, tier.device)
        self._block: torch.Tensor | None = None
        """Header and inputs on the device. Allocated by `launch`, on the planning stream: memory that another stream
        has freed may still be written by that stream's kernels."""
        self._inputs: torch.Tensor | None = None
        """The block after the header."""
        self._counts: torch.Tensor | None = None
        """Counts of the insertion, then three int32 counts of segments per batch. Allocated with `_block`."""
        self._one: torch.Tensor | None = None
        """The words 1 and 0. Allocated with `_block`."""
        self._record = fixed_words(COUNTS + 2 * len(shape.ids), tier.device)
        """`_counts` on the host."""
        self._written_header, self._counted = self._header.numpy(), self._record.numpy()
        self._insert_counts = self._counted[:COUNTS]
        self._segment_counts = self._counted[COUNTS:].view(np.int32).reshape(-1, 4)[:, :3]
        self._words = [layout.words for layout in shape.layouts]
        self._recordings: dict[_Kind, Recording[tuple[InsertPlan, torch.Tensor]] | None] = {}
        self._resident_windows = 0
        """Number of last windows in a row without a new key."""
        self._free: deque[_Lists] = deque()
        """Lists of windows that were released, oldest first."""
        self._spare_lists = _SPARE_LISTS
        self._events: deque[torch.cuda.Event] = deque(torch.cuda.Event() for _ in range(_EVENTS) if self._cuda)  # type: ignore[no-untyped-call]

    def stage(self, inputs: Sequence[BagInputs]) -> StagedIds:
        """Write the inputs of a window to a block in page-locked memory, and start the upload of many. Any thread.

        Ids that are in page-locked memory themselves stay there: `launch` uploads them, and the block has the rest.
        They must not change until then. The tensors of `StagedIds` keep their memory alive, and `HbmTier` keeps
        `StagedIds` until `_wait` has seen the event that is recorded after the copies.
        """
        sources = [source for batch in inputs for source in batch.values()]
        in_place = self._in_place(sources)
        skipped = self._keys if in_place else 0
        rest = self.shape.words - HEADER - skipped
        block = torch.empty(rest, dtype=torch.int64, pin_memory=self._cuda and rest > 0)
        words = block.numpy()
        first, sizes = self._keys - skipped, self.shape.input_sizes()
        if not in_place:
            listed = words[:first].view(np.uint64)
            np.concatenate([np.empty(0, np.uint64), *(source.ids for source in sources)], out=listed)
        for source, offsets, weights in zip(sources, sizes[::2], sizes[1::2], strict=True):
            if offsets:
                words[first : first + offsets] = source.offsets
            if weights:
                words[first + offsets : first + offsets + weights].view(np.float32)[: len(source.ids)] = source.weights
            first += offsets + weights
        if self._keys >= _IDS_AHEAD:
            return self._tier.upload((*in_place, block), self._keys)
        return StagedIds(block, self._keys, None, in_place)

    def _in_place(self, sources: Sequence[BagInput]) -> tuple[torch.Tensor, ...]:
        """Return the ids of all bags as tensors in page-locked memory; empty: copy them to the block."""
        only_ids = self.shape.words == HEADER + self._keys and len(sources) == 1
        small = not only_ids and self._keys < _DIRECT_IDS * len(sources)
        if small or not all(source.ids.flags.writeable for source in sources):  # torch has no read-only tensors
            return ()
        ids = tuple(torch.from_numpy(source.ids.view(np.int64)) for source in sources)
        return ids if all(map(is_page_locked, ids)) else ()

    def launch(self, ids: StagedIds, used: int, now: int, completed: int) -> Callable[[], Assigned]:
        """Plan a window: see `Assign`."""
        self._device_memory()
        assert self._inputs is not None
        header = self._written_header  # the upload before has ended: `wait` ran
        header[0], header[1], header[2] = used, now, completed
        first = 0
        for keys in ids.in_place:
            self._inputs[first : first + len(keys)].copy_(keys, non_blocking=True)
            first += len(keys)
        if len(ids.keys):
            self._inputs[first:].copy_(ids.keys, non_blocking=True)
        insert = _Kind.EVICT if self._keys > self._tier.capacity - used else _Kind.INSERT
        if self._resident_windows < _RESIDENT_WINDOWS:
            return self._start(insert)
        return partial(self._wait_found, self._start(_Kind.FIND), insert)

    def _start(self, kind: _Kind) -> Callable[[], Assigned]:
        """Plan the window whose inputs are on the device."""
        lists = self._take_lists()
        recording = self._recordings.get(kind)
        if recording is None:  # as it is, which compiles and loads the kernels
            self._recordings[kind] = None
            plan, memory = self._run(kind)
        else:
            plan, memory = recording.replay()
        lists.memory.copy_(memory, non_blocking=True)
        event = None
        if self._cuda:
            event = self._events[0]
            self._events.rotate()
            event.record(current_stream(self._tier.device))
        return partial(self._wait, plan, lists, event)

    def _take_lists(self) -> _Lists:
        """Return memory for the lists of a window, which the planning stream may overwrite from now on."""
        if self._free and (self._spare_lists == 0 or not self._free[0].in_use):
            lists = self._free.popleft()
            for event in lists.uses.values():
                current_stream(self._tier.device).wait_event(event)
            return lists
        self._spare_lists -= bool(self._free)
        memory = torch.empty(sum(self._words), dtype=torch.int32, device=self._tier.device)
        return _Lists(memory, self._lists_in(memory))

    def _lists_in(self, memory: torch.Tensor) -> list[PlanLists]:
        """Return the lists of all batches, as views of `memory`."""
        parts = zip(self.shape.layouts, torch.split(memory, self._words), self.shape.ids, strict=True)
        return [PlanLists(layout, piece, ids) for layout, piece, ids in parts]

    def _give_back(self, lists: _Lists) -> None:
        """Use the lists for a later window, after what training has launched so far. Any thread."""
        self._tier.record_uses(lists.uses)
        self._free.append(lists)

    def _wait(self, plan: InsertPlan, lists: _Lists, event: torch.cuda.Event | None) -> Assigned:
        if event is not None:
            event.synchronize()
        counts, segments = self._insert_counts.tolist(), self._segment_counts.tolist()
        resident = counts[NEW.value] == 0 and counts[LOST.value] == 0
        self._resident_windows = self._resident_windows + 1 if resident else 0
        if counts[NEW.value]:
            plan = plan.copy()
        batches = list(zip(lists.batches, segments, strict=True))
        return Assigned(plan, counts, batches, event, partial(self._give_back, lists))

    def _wait_found(self, wait: Callable[[], Assigned], insert: _Kind) -> Assigned:
        """Wait for a plan that only finds keys; plan the window again if one of them is not resident."""
        assigned = wait()
        if assigned.counts[NEW.value] == 0:
            return assigned
        assert assigned.recycle is not None
        assigned.recycle()
        return self._start(insert)()

    def _device_memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `_block` and `_counts`. On the planning stream only."""
        if self._block is None or self._counts is None:
            self._block = torch.empty(self.shape.words, dtype=torch.int64, device=self._tier.device)
            self._inputs = self._block[HEADER:]
            self._counts = torch.zeros(len(self._record), dtype=torch.int64, device=self._tier.device)
            self._one = one_and_zero(self._tier.device)
        return self._block, self._counts

    @property
    def due(self) -> bool:
        """Whether `record` has something to do."""
        return any(recording is None for recording in tuple(self._recordings.values()))

    def record(self) -> None:
        """Record what has run before. On the thread that trains, as torch's random generators take part."""
        with self._tier.planning():
            for kind in [kind for kind, recording in self._recordings.items() if recording is None]:
                self._recordings[kind] = Recording(partial(self._run, kind), self._tier.device, ahead=True)

    def _run(self, kind: _Kind) -> tuple[InsertPlan, torch.Tensor]:
        block, counts = self._device_memory()
        assert self._one is not None
        copy_header(self._header, block, self._one)
        memory = torch.empty(sum(self._words), dtype=torch.int32, device=self._tier.device)
        lists = self._lists_in(memory)
        plan = self._find(block, counts, lists) if kind is _Kind.FIND else self._insert(block, counts, kind)
        inputs = iter(torch.split(block[HEADER + self.shape.keys :], self.shape.input_sizes()))
        first = 0
        segment_counts = counts[COUNTS:].view(torch.int32).view(-1, 4)
        for n, batch in enumerate(lists):
            bags = []
            for count in batch.ids:
                offsets, weights = next(inputs), next(inputs)
                bags.append((offsets, weights.view(torch.float32)[:count]))
            slots = plan.slots[first : first + sum(batch.ids)]
            first += sum(batch.ids)
            segment_counts[n, :3].copy_(write_plan(batch, slots, bags).counts)
        self._record.copy_(counts, non_blocking=True)
        return plan, memory

    def _insert(self, block: torch.Tensor, counts: torch.Tensor, kind: _Kind) -> InsertPlan:
        tier, keys = self._tier, block[HEADER : HEADER + self.shape.keys]
        used, now, completed, _ = torch.split(block[:HEADER], 1)
        plan = find_or_insert(
            tier.index, tier.residents, keys, used=used, now=now, completed=completed, count_visits=True,
            evict=kind is _Kind.EVICT,
        )  # fmt: skip
        counts[:COUNTS].copy_(plan.counts)
        return plan

    def _find(self, block: torch.Tensor, counts: torch.Tensor, lists: list[PlanLists]) -> InsertPlan:
        tier, keys = self._tier, block[HEADER : HEADER + self.shape.keys]
        bags = [slots[:ids] for batch in lists for slots, ids in zip(batch.parts.slots, batch.ids, strict=True)]
        slots = bags[0] if len(bags) == 1 else torch.empty(len(keys), dtype=torch.int32, device=tier.device)
        counts[:COUNTS].zero_()
        find_resident(tier.index, tier.residents, keys, slots, counts[NEW.value :], now=block[1:2])
        return InsertPlan.of_residents(slots, counts[:COUNTS])


def copy_header(header: torch.Tensor, block: torch.Tensor, one: torch.Tensor) -> None:
    """Copy the header by a kernel: a copy by the device's copy engine would wait for an upload of ids before it.

    one   `one_and_zero`
    """
    rows, target = (words[:HEADER].view(torch.int32).view(1, -1) for words in (header, block))
    copy_in(target, one[1:].view(torch.int32), rows, one)


def one_and_zero(device: torch.device) -> torch.Tensor:
    """Return the number of rows and the slot of `copy_header`."""
    return torch.arange(1, -1, -1, device=device)


class PlanGraphs:
    """Recordings of the shapes that a table's windows have more than once."""

    def __init__(self, tier: HbmTier) -> None:
        self.enabled = False
        """Whether windows are planned by recordings, where possible. The results are the same."""
        self._tier = tier
        self._graphs: dict[WindowShape, PlanGraph] = {}
        self._seen: Counter[WindowShape] = Counter()

    def record(self) -> None:
        """Record planning that has run once. Costs nothing otherwise."""
        for graph in tuple(self._graphs.values()):
            if graph.due:
                graph.record()

    def get(self, shape: WindowShape) -> PlanGraph | None:
        """Return the recording for a window of this shape; None: plan it without. One thread at a time."""
        if not self.enabled or shape.keys == 0:
            return None
        graph = self._graphs.get(shape)
        if graph is None and len(self._graphs) < _MAX_GRAPHS and len(self._seen) < _MAX_SHAPES:
            self._seen[shape] += 1
            if self._seen[shape] == 2:
                graph = self._graphs[shape] = PlanGraph(self._tier, shape)
        return graph
