"""`tc.nn`: modules that are called as `torch.nn.EmbeddingBag` and `torch.nn.Embedding`, on rows of a table.

The key of a row is its id. Modules on one table share its rows. Each call has a batch of its own: on a table of
`tc.Tiers` its field has the name of the table, so that it is not planned for other tables that are stored with it.
`EmbeddingBags` calls several modules with one batch, whose fields have the names of their tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch._compile import _disable_dynamo

from thermocline.arrays import Offsets, as_keys
from thermocline.batch import Batch
from thermocline.embedding.bag import EmbeddingBag as FieldBag
from thermocline.embedding.bags_side_by_side import pool_side_by_side
from thermocline.embedding.graph_op import call_in_graph, in_graph
from thermocline.embedding.member_table import MemberTable
from thermocline.embedding.table import Table
from thermocline.errors import require

Mode = Literal["sum", "mean", "max"]


class EmbeddingBag(FieldBag):
    """Pools bags of ids: (input, offsets) -> float32[bags, dim], as `torch.nn.EmbeddingBag`.

    mode                  "sum", "mean" or "max"; an empty bag gives zeros. The gradient of a maximum goes to the first
                          id that has it
    include_last_offset   offsets end with the number of ids
    padding_idx           an id that is left out of its bag, and of the number of ids of a mean; a negative one counts
                          from the end of num_embeddings, if that is given
    num_embeddings        raise IndexError for ids outside 0 .. num_embeddings - 1; None: every id has a row

    `max_norm` and `scale_grad_by_freq` of torch are not supported.
    """

    def __init__(
        self,
        table: Table | MemberTable,
        mode: Mode = "mean",
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        num_embeddings: int | None = None,
    ) -> None:
        require(mode in ("sum", "mean", "max"), "mode", mode, "sum, mean or max")
        super().__init__(table, _fields(table), pooling="none" if mode == "max" else mode)
        self.mode, self.include_last_offset = mode, include_last_offset
        self.padding_idx, self.num_embeddings = _padding(padding_idx, num_embeddings), num_embeddings

    def forward(
        self,
        input: torch.Tensor | Batch,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return float32[bags, dim].

        input                int32 or int64: [bags, ids per bag], or [ids] with `offsets`; or a batch of `batch_of`,
                             of this module or of `EmbeddingBags`
        per_sample_weights   one weight per id, with mode "sum"; receives its gradient
        """
        if torch.compiler.is_compiling():
            if in_graph(input):
                bags = self._bags(input, offsets)
                return call_in_graph(self, input, offsets, per_sample_weights, (bags, self.table.dim))
            return _bag_outside_graph(self, input, offsets, per_sample_weights)
        return self._bag(input, offsets, per_sample_weights)

    def call_outside_graph(self, batch: Any, offsets: Any, weights: torch.Tensor | None) -> torch.Tensor:
        """Run the op of a graph."""
        return self._bag(batch, offsets, weights)

    def _bags(self, input: Any, offsets: torch.Tensor | None) -> int:
        """Return the number of bags of arguments that `_bag` accepts."""
        if isinstance(input, Batch):
            assert input.handle is not None
            return input.handle.examples
        if input.ndim == 2 or offsets is None:
            return int(input.shape[0])
        return int(offsets.shape[0]) - int(self.include_last_offset)

    def batch_of(self, input: torch.Tensor, offsets: torch.Tensor | None = None) -> Batch:
        """Return the arguments of `forward` as `tc.Batch`, for `tc.prefetch`."""
        return self._convert(input, offsets)[0]

    def _bag(
        self, input: torch.Tensor | Batch, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> torch.Tensor:
        if weights is not None and self.mode != "sum":
            raise ValueError(f"per_sample_weights are given, but mode is {self.mode!r}: weights need mode 'sum'")
        kept: torch.Tensor | None = None
        if isinstance(input, Batch):
            batch = input
            if self.padding_idx is not None and (self._own_ids(batch)[0] == self.padding_idx % 2**64).any():
                raise ValueError(
                    f"the batch has ids {self.padding_idx}, the padding_idx: make it with batch_of, which removes them"
                )
        else:
            if weights is not None and weights.shape != input.shape:
                raise ValueError(
                    f"per_sample_weights have shape {tuple(weights.shape)}: expected {tuple(input.shape)}, as input"
                )
            batch, kept = self._convert(input, offsets)
        if weights is not None:
            weights = weights.reshape(-1)
            weights = weights if kept is None else weights[kept.to(weights.device)]
        out = super().forward(batch, weights)
        return _largest(out, self._own_ids(batch)[1]) if self.mode == "max" else out.squeeze(1)

    def _own_ids(self, batch: Batch) -> Any:
        """Return ids and offsets of the module's field of a batch."""
        return batch.select(self.fields)[:2]

    def _convert(self, input: torch.Tensor, offsets: torch.Tensor | None) -> tuple[Batch, torch.Tensor | None]:
        """Return the batch, and which ids it has if not all of them."""
        ids, starts = self._arguments(input, offsets)
        batch = _batch(ids, starts, self.field_names)  # checks the offsets
        if self.padding_idx is None:
            return batch, None
        kept = ids != self.padding_idx
        counts = np.concatenate([[0], kept.numpy().cumsum()])
        return _batch(ids[kept], counts[starts], self.field_names), kept

    def _arguments(self, input: torch.Tensor, offsets: torch.Tensor | None) -> tuple[torch.Tensor, Offsets]:
        """Return ids, of one dimension, and offsets with the last one, both int64 on the host. Does not check them."""
        ids = _as_ids(input, self.num_embeddings)
        if ids.ndim == 2:
            if offsets is not None:
                raise ValueError("offsets are given with an input of two dimensions: each of its rows is a bag")
            starts = np.arange(len(ids) + 1) * ids.shape[1]
        elif ids.ndim == 1 and offsets is not None:
            starts = _on_host(offsets).numpy()
            if not self.include_last_offset:
                given, starts = starts, np.empty(len(starts) + 1, np.int64)
                starts[:-1], starts[-1] = given, ids.shape[0]
        else:
            raise ValueError(
                f"input has shape {tuple(input.shape)} and offsets are {'missing' if offsets is None else 'given'}: "
                "expected two dimensions, or one and offsets"
            )
        return ids.reshape(-1), starts


class EmbeddingBags(torch.nn.ModuleList):
    """`EmbeddingBag` modules that are called together, as DLRM calls its tables: (inputs, offsets) -> outputs.

        bags = tc.nn.EmbeddingBags([tc.nn.EmbeddingBag(tiers.table(...), mode="sum") for ...])
        vectors = bags(inputs, offsets)

    Equal to [bag(ids, starts) for bag, ids, starts in zip(bags, inputs, offsets)]. Modules on tables of `tc.Tiers`, a
    table each, with equal numbers of bags, read one batch: those that are stored together have one plan, one pooling
    and one update, instead of one per module. Other modules are called one by one.
    """

    def forward(
        self,
        inputs: Sequence[torch.Tensor] | torch.Tensor | Batch,
        offsets: Sequence[torch.Tensor | None] | torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Return float32[bags, dim] of each module.

        inputs    of each module, in order: see `EmbeddingBag.forward`; or a batch of `batch_of`
        offsets   of each module; None: inputs have two dimensions
        """
        if isinstance(inputs, Batch):
            return [bag(inputs) for bag in self]
        arguments = self._pairs(inputs, offsets)
        batch = None if torch.compiler.is_compiling() else self._one_batch(arguments)
        if batch is None:
            return [bag(ids, starts) for bag, (ids, starts) in zip(self, arguments, strict=True)]
        return [bag(batch) for bag in self]

    def joined(
        self,
        inputs: Sequence[torch.Tensor] | torch.Tensor | Batch,
        offsets: Sequence[torch.Tensor | None] | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the outputs of `forward` side by side, float32[bags, columns]: without a copy, where the tables are
        stored together and in the order in which their modules were made."""
        batch = inputs if isinstance(inputs, Batch) else None
        if batch is None and not torch.compiler.is_compiling():
            batch = self._one_batch(self._pairs(inputs, offsets))
        if batch is None or any(bag.mode == "max" for bag in self._bags):
            return torch.cat(self(inputs if batch is None else batch, None if batch is not None else offsets), 1)
        return pool_side_by_side(self._bags, batch)

    def batch_of(
        self,
        inputs: Sequence[torch.Tensor] | torch.Tensor,
        offsets: Sequence[torch.Tensor | None] | torch.Tensor | None = None,
    ) -> Batch:
        """Return the arguments of `forward` as one `tc.Batch`, for `tc.prefetch`."""
        batch = self._one_batch(self._pairs(inputs, offsets))
        if batch is None:
            raise ValueError(
                "the modules cannot read one batch: each must have a table of tc.Tiers of its own, and all of them the "
                "same number of bags"
            )
        return batch

    @property
    def _bags(self) -> list[EmbeddingBag]:
        return list(self)  # type: ignore[arg-type]

    def _pairs(self, inputs: Any, offsets: Any) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        starts = [None] * len(self) if offsets is None else list(offsets)
        if len(inputs) != len(self) or len(starts) != len(self):
            raise ValueError(
                f"{len(inputs)} inputs and {len(starts)} offsets for {len(self)} modules: give one of each per module"
            )
        return list(zip(inputs, starts, strict=True))

    def _one_batch(self, arguments: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> Batch | None:
        """Return one batch for all modules, or None."""
        bags = self._bags
        names = tuple(bag.table.name for bag in bags)
        if len(set(names)) < max(1, len(bags)) or not all(isinstance(bag.table, MemberTable) for bag in bags):
            return None
        parts = []
        for bag, (input, offsets) in zip(bags, arguments, strict=True):
            if bag.padding_idx is None:
                ids, starts = bag._arguments(input, offsets)
                parts.append((ids.numpy(), starts))
            else:
                own = bag.batch_of(input, offsets)
                parts.append((own.ids.view(np.int64), own.offsets))
        if len({len(starts) for _, starts in parts}) > 1:
            return None
        starts = np.stack([starts for _, starts in parts])
        if not starts.shape[1]:
            return None
        lengths = np.diff(starts)
        if starts[:, 0].any() or (lengths < 0).any() or any(own[-1] != len(ids) for ids, own in parts):
            return None  # a module that is called alone raises
        if (lengths == 1).all():
            one_each = np.stack([ids for ids, _ in parts], axis=1).reshape(-1)
            return Batch(as_keys(one_each), np.arange(len(one_each) + 1), len(bags), names=names)
        return Batch.from_jagged(names, np.concatenate([ids for ids, _ in parts]), lengths.reshape(-1))


class Embedding(FieldBag):
    """One row per id: ids of any shape -> float32[*shape, dim], as `torch.nn.Embedding`.

    padding_idx      an id whose vector is zero and has no row; a negative one: as in `EmbeddingBag`
    num_embeddings   raise IndexError for ids outside 0 .. num_embeddings - 1; None: every id has a row
    """

    def __init__(
        self, table: Table | MemberTable, *, padding_idx: int | None = None, num_embeddings: int | None = None
    ) -> None:
        super().__init__(table, _fields(table), pooling="none")
        self.padding_idx, self.num_embeddings = _padding(padding_idx, num_embeddings), num_embeddings

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the rows of int32 or int64 ids."""
        if torch.compiler.is_compiling():
            if in_graph(input):
                return call_in_graph(self, input, None, None, (*input.shape, self.table.dim))
            return _rows_outside_graph(self, input)
        return self._rows(input)

    def call_outside_graph(self, batch: Any, offsets: Any, weights: Any) -> torch.Tensor:
        """Run the op of a graph."""
        return self._rows(batch)

    def _rows(self, input: torch.Tensor) -> torch.Tensor:
        ids = _as_ids(input, self.num_embeddings).reshape(-1)
        shape = (*input.shape, self.table.dim)
        kept = None if self.padding_idx is None else ids != self.padding_idx
        if kept is None or kept.all():
            return super().forward(_one_bag(ids, self.field_names)).view(shape)
        rows = super().forward(_one_bag(ids[kept], self.field_names))
        return rows.new_zeros(len(ids), self.table.dim).index_put((kept.to(rows.device),), rows).view(shape)


# See `bag._forward_outside_graph`.
_bag_outside_graph = _disable_dynamo(EmbeddingBag._bag)
_rows_outside_graph = _disable_dynamo(Embedding._rows)


def _padding(index: int | None, num_embeddings: int | None) -> int | None:
    """Return the id of the padding: with `num_embeddings`, a negative index counts from the end, as in torch."""
    if index is None or num_embeddings is None:
        return index
    allowed = f"{-num_embeddings} to {num_embeddings - 1} (num_embeddings)"
    require(-num_embeddings <= index < num_embeddings, "padding_idx", index, allowed)
    return index % num_embeddings


def _fields(table: Table | MemberTable) -> int | list[str]:
    return [table.name] if isinstance(table, MemberTable) else 1


def _batch(ids: torch.Tensor, offsets: Offsets, names: tuple[str, ...] | None) -> Batch:
    return Batch(as_keys(ids), offsets, 1, names=names)


def _one_bag(ids: torch.Tensor, names: tuple[str, ...] | None) -> Batch:
    return _batch(ids, np.array([0, len(ids)]), names)


def _on_host(numbers: torch.Tensor) -> torch.Tensor:
    """Return int64 on the host; the tensor itself if it is that."""
    if numbers.dtype == torch.int64 and numbers.is_cpu:
        return numbers
    return numbers.detach().cpu().to(torch.int64)


def _as_ids(input: Any, num_embeddings: int | None) -> torch.Tensor:
    """Return int64 ids on the host."""
    if not isinstance(input, torch.Tensor) or input.dtype not in (torch.int32, torch.int64):
        kind = input.dtype if isinstance(input, torch.Tensor) else type(input).__name__
        raise TypeError(f"input is {kind}: it must be a tensor of int32 or int64 ids")
    ids = _on_host(input)
    if num_embeddings is not None and ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= num_embeddings:
            raise IndexError(
                f"input has id {low if low < 0 else high}: ids are from 0 to {num_embeddings - 1} (num_embeddings)"
            )
    return ids


def _largest(rows: torch.Tensor, offsets: Any) -> torch.Tensor:
    """Return the largest element of each bag and column; of equal ones, the first has the gradient."""
    lengths = torch.from_numpy(offsets).diff().to(rows.device)
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=rows.device), lengths)[:, None].expand_as(rows)
    values = rows.detach()
    shape = (len(lengths), rows.shape[1])
    top = values.new_full(shape, -torch.inf).scatter_reduce(0, bag, values, "amax")
    position = torch.arange(len(rows), device=rows.device)[:, None].expand_as(rows)
    position = torch.where(values == top.gather(0, bag), position, len(rows))
    first = position.new_full(shape, len(rows)).scatter_reduce(0, bag, position, "amin")
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])  # of an empty bag
    return padded.gather(0, first)
