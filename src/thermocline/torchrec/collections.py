"""`EmbeddingBagCollection` and `EmbeddingCollection`: the modules of TorchRec on tables of one `tc.Tiers`.

Each config has a table; the key of a row is its id. Rows are updated at the end of each backward pass.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch

from thermocline.batch import Batch
from thermocline.embedding.bags_side_by_side import pool_side_by_side
from thermocline.embedding.batch_plan import Pooling
from thermocline.embedding.member_table import MemberTable
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.precision import Precision
from thermocline.embedding.shared_tiers import Tiers
from thermocline.embedding.table import Table
from thermocline.embedding.table_storages import bytes_of_rows
from thermocline.errors import ThermoclineError
from thermocline.torchrec.configs import check_config, feature_names, pooling_of, precision_of
from thermocline.torchrec.in_backward import learning_rate, note_step
from thermocline.torchrec.jagged_tensor import JaggedTensor, is_keyed_jagged, require_equal_batches
from thermocline.torchrec.keyed_tensor import KeyedTensor
from thermocline.torchrec.table_rows import TableRows


class _Collection(torch.nn.Module):
    """Tables by name, in a ModuleDict `attribute`, and what both kinds of collections share."""

    attribute: str

    def __init__(
        self,
        tables: Sequence[Any],
        poolings: Sequence[Pooling],
        device: Any,
        *,
        optimizer: Optimizer | None,
        mem: str | SupportsIndex | None,
        hbm: str | SupportsIndex | None,
        ssd: str | os.PathLike[str] | None,
        tiers: Tiers | None,
        check_ids: bool,
        table_options: dict[str, Any] | None,
    ) -> None:
        super().__init__()
        self._configs = list(tables)
        self._budgets = {"mem": mem, "hbm": hbm, "ssd": ssd}
        self._check_ids = check_ids
        self._table_options = dict(table_options or {})
        given = [name for name, value in {**self._budgets, "table_options": table_options}.items() if value is not None]
        if tiers is not None and given:
            raise ValueError(f"both tiers and {', '.join(given)} are given: tc.Tiers has the budgets of its tables")
        self._tiers = tiers
        rows = torch.nn.ModuleDict()
        for config, pooling in zip(self._configs, poolings, strict=True):
            if config.name in rows:
                raise ValueError(f"Duplicate table name {config.name}: names of tables must be unique")
            check_config(config)
            precision_of(config)
            rows[config.name] = TableRows(config, pooling, self._open, optimizer, device or "cpu")
        self.add_module(self.attribute, rows)
        used = [feature for config in self._configs for feature in feature_names(config)]
        self._names = [
            [f"{feature}@{config.name}" if used.count(feature) > 1 else feature for feature in feature_names(config)]
            for config in self._configs
        ]
        """Names of the outputs, by table."""
        if tiers is not None:
            tiers.add_module(self)

    @property
    def _rows(self) -> list[TableRows]:
        return list(getattr(self, self.attribute).values())

    @property
    def tables(self) -> dict[str, MemberTable]:
        """The tables by name. Opens them: their optimizer must be known."""
        return {rows.config.name: rows.table for rows in self._rows}

    @property
    def tiers(self) -> Tiers:
        """The budget of all tables. Opens them."""
        self._open()
        assert self._tiers is not None
        return self._tiers

    @property
    def device(self) -> torch.device:
        """Device of the outputs."""
        rows = self._rows
        return rows[0].weight.device if rows else torch.device("cpu")

    def features(self) -> set[str]:
        """Return the names of the features that the collection reads."""
        return {feature for rows in self._rows for feature in rows.features}

    def reset_parameters(self) -> None:
        """Do nothing before the first use: a row begins with its initial values. Later: raise."""
        if any(rows._table is not None for rows in self._rows):
            raise ThermoclineError(
                "reset_parameters() after the first use: trained rows cannot be reset; make a new collection"
            )

    # ---- opening

    def _open(self) -> None:
        """Declare and open all tables, as the budgets are divided by their sizes."""
        if self._tiers is not None:
            self._tiers.row_tables  # noqa: B018 - opens them
            return
        budgets = {name: value for name, value in self._budgets.items() if value is not None}
        if self._budgets["mem"] is None:
            budgets["mem"] = sum(_bytes_of(rows.config, rows.chosen_optimizer()) for rows in self._rows)
        self._tiers = Tiers(**budgets, table_options=self._table_options)
        self._tiers.add_module(self)
        try:
            self._tiers.row_tables  # noqa: B018
        except BaseException:
            if not any(rows.is_declared for rows in self._rows):
                self._tiers = None  # the collection is unused still, and can be copied
            raise

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self._tiers is not None and not any(rows.is_declared for rows in self._rows):
            raise TypeError(
                "a collection with tiers=... cannot be copied or pickled: names of the tables of tc.Tiers are unique. "
                "Make another collection with a tc.Tiers of its own"
            )
        return super().__reduce_ex__(protocol)

    def declare_tables(self) -> None:
        """Declare the tables, whose optimizers must be known. Called by `tc.Tiers` at the first use of any table."""
        assert self._tiers is not None
        chosen = [(rows, rows.chosen_optimizer()) for rows in self._rows if not rows.is_declared]
        for rows, optimizer in chosen:
            rows.declare(self._tiers, optimizer, self)

    def fill_tables(self) -> None:
        """Load initial rows that are no function of the id. Called by `tc.Tiers` once the tables are open."""
        for rows in self._rows:
            rows.fill()

    # ---- forward and backward

    def batch_of(self, features: Any) -> Batch:
        """Return a KeyedJaggedTensor, ours or TorchRec's, as `tc.Batch`; that of `prefetch`, if it has prepared one."""
        if not is_keyed_jagged(features):
            raise TypeError(f"features are a {type(features).__name__}: expected a KeyedJaggedTensor")
        batch = prepared_batch(features)
        if batch is None:
            batch = to_batch(features)
        if self._check_ids:
            self._require_ids_in_range(batch)
        return batch

    def _require_ids_in_range(self, batch: Batch) -> None:
        for rows in self._rows:
            size = rows.config.num_embeddings
            for feature in rows.features:
                ids = batch.select([feature])[0]
                if len(ids) and ids.max() >= size:
                    worst = int(ids.view("int64")[ids >= size][0])
                    raise IndexError(
                        f"feature {feature!r} has id {worst}: table {rows.config.name!r} has ids from 0 to {size - 1} "
                        "(num_embeddings); without check_ids every id is accepted"
                    )

    def _output(self, values: torch.Tensor) -> torch.Tensor:
        """Update rows after the backward pass through `values`, and move them to the device of the collection."""
        if values.requires_grad:
            values = _StepAfterBackward.apply(values, self)  # type: ignore[no-untyped-call]
        return values.to(self.device)

    def step(self) -> None:
        """Apply the gradients of a backward pass to all tables. Called at its end."""
        rates: dict[Table, dict[str, float]] = {}
        for rows in self._rows:
            table = rows.table.storage
            if table.pending_gradients and (rate := learning_rate(rows.weight)) is not None:
                rates.setdefault(table, {})[rows.config.name] = rate
        for table, by_name in rates.items():
            if len(set(by_name.values())) > 1:
                raise RuntimeError(
                    f"tables {list(by_name)} have the learning rates {list(by_name.values())}, but were given one "
                    "optimizer with one rate and are stored together: give them different rates before the first use"
                )
            table.lr = next(iter(by_name.values()))
        for table in dict.fromkeys(rows.table.storage for rows in self._rows):
            if table.pending_gradients:
                stepped = [rows for rows in self._rows if rows.table.storage is table]
                table.step()
                for rows in stepped:
                    note_step(rows.weight)


class _StepAfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, collection: _Collection) -> torch.Tensor:
        ctx.collection = collection
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.autograd.Variable._execution_engine.queue_callback(ctx.collection.step)
        return grad, None


class EmbeddingBagCollection(_Collection):
    """Pooled vectors of all features: KeyedJaggedTensor -> KeyedTensor, float32.

    Parameters are named `embedding_bags.<table>.weight` and have no elements: see `TableRows`. They must get an
    optimizer before the first use, by `apply_optimizer_in_backward` or `optimizer`.
    """

    attribute = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[Any],
        is_weighted: bool = False,
        device: Any = None,
        *,
        optimizer: Optimizer | None = None,
        mem: str | SupportsIndex | None = None,
        hbm: str | SupportsIndex | None = None,
        ssd: str | os.PathLike[str] | None = None,
        tiers: Tiers | None = None,
        check_ids: bool = False,
        table_options: dict[str, Any] | None = None,
    ) -> None:
        """
        tables        `EmbeddingBagConfig` of this package or of TorchRec
        is_weighted   use the weights of the KeyedJaggedTensor
        device        device of the outputs; "meta": the tables cannot be used before `to_empty`
        optimizer     of rows whose parameter gets none by `apply_optimizer_in_backward`
        mem, hbm      bytes for all tables together (`tc.Tiers`); mem None: `num_embeddings` rows of each table fit
        ssd           folder for the rows beyond memory: a store for all tables of equal dim, optimizer and precision
        tiers         a `tc.Tiers` in place of these: one budget for several collections and other tables. Rows of the
                      collection are updated in backward, and are stored apart from those of other collections
        check_ids     raise IndexError for ids outside num_embeddings; else ids up to 2^48 - 1 have rows too
        table_options further arguments of `tc.Table`, for each store
        """
        super().__init__(
            tables,
            [pooling_of(config) for config in tables],
            device,
            optimizer=optimizer,
            mem=mem,
            hbm=hbm,
            ssd=ssd,
            tiers=tiers,
            check_ids=check_ids,
            table_options=table_options,
        )
        self._is_weighted = is_weighted
        self._lengths = [rows.config.embedding_dim for rows in self._rows for _ in rows.features]

    def forward(self, features: Any) -> KeyedTensor:
        """Return the pooled vectors of all features; of a feature of two tables by name `feature@table`."""
        batch = self.batch_of(features)
        weights = features.weights_or_none() if self._is_weighted else None
        if self._is_weighted and weights is None:
            raise ValueError("the collection is weighted, but the KeyedJaggedTensor has no weights: give it weights")
        bags = [bag for rows in self._rows for bag in rows.ready_bags()]
        names = [name for names in self._names for name in names]
        return KeyedTensor(names, self._lengths, self._output(pool_side_by_side(bags, batch, weights)))

    def embedding_bag_configs(self) -> list[Any]:
        """Return the configs."""
        return self._configs

    def is_weighted(self) -> bool:
        """Return whether the collection uses weights."""
        return self._is_weighted


class EmbeddingCollection(_Collection):
    """A vector per id: KeyedJaggedTensor -> JaggedTensor by feature, float32. All tables have the same dim.

    Parameters are named `embeddings.<table>.weight`. Otherwise as `EmbeddingBagCollection`.
    """

    attribute = "embeddings"

    def __init__(
        self,
        tables: Sequence[Any],
        device: Any = None,
        need_indices: bool = False,
        *,
        optimizer: Optimizer | None = None,
        mem: str | SupportsIndex | None = None,
        hbm: str | SupportsIndex | None = None,
        ssd: str | os.PathLike[str] | None = None,
        tiers: Tiers | None = None,
        check_ids: bool = False,
        table_options: dict[str, Any] | None = None,
    ) -> None:
        """
        need_indices   return the ids as the weights of the JaggedTensors
        Other arguments: see `EmbeddingBagCollection`.
        """
        dims = {config.name: config.embedding_dim for config in tables}
        if len(set(dims.values())) > 1:
            raise ValueError(f"embedding_dim of the tables is {dims}: all tables of the collection must have the same")
        super().__init__(
            tables,
            ["none"] * len(tables),
            device,
            optimizer=optimizer,
            mem=mem,
            hbm=hbm,
            ssd=ssd,
            tiers=tiers,
            check_ids=check_ids,
            table_options=table_options,
        )
        self._need_indices = need_indices

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Return the vectors of each feature; of a feature of two tables by name `feature@table`."""
        batch = self.batch_of(features)
        parts = features.to_dict()
        vectors: dict[str, JaggedTensor] = {}
        for rows, names in zip(self._rows, self._names, strict=True):
            for bag, feature, name in zip(rows.ready_bags(), rows.features, names, strict=True):
                part = parts[feature]
                indices = part.values() if self._need_indices else None
                vectors[name] = JaggedTensor(self._output(bag(batch)), indices, lengths=part.lengths())
        return vectors

    def embedding_configs(self) -> list[Any]:
        """Return the configs."""
        return self._configs

    def embedding_dim(self) -> int:
        """Return the dim of all tables."""
        return int(self._configs[0].embedding_dim)

    def need_indices(self) -> bool:
        """Return whether the ids are returned too."""
        return self._need_indices

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of the outputs, by table."""
        return self._names


def collections_of(model: torch.nn.Module) -> list[_Collection]:
    """Return the collections of a model."""
    return [module for module in model.modules() if isinstance(module, _Collection)]


def _bytes_of(config: Any, optimizer: Optimizer) -> int:
    """Return bytes of DRAM that hold all rows of a table, with their index."""
    return bytes_of_rows(
        config.num_embeddings, Precision.of(precision_of(config)).row_bytes(config.embedding_dim, optimizer)
    )


# ---- conversion


def to_batch(features: Any) -> Batch:
    """Convert a KeyedJaggedTensor to a `tc.Batch` without its weights: ids are keys."""
    require_equal_batches(features)
    values = features.values()
    if values.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids have dtype {values.dtype}: they must be int32 or int64")
    ids, lengths = values.detach().cpu().to(torch.int64), features.lengths().detach().cpu()
    return Batch.from_jagged(features.keys(), ids, lengths)


class _Prepared:
    """A batch whose rows `prefetch` has prepared, and the tensor it was made from."""

    def __init__(self, batch: Batch, values: torch.Tensor) -> None:
        self.batch, self._values, self._version = batch, values, values._version

    def matches(self, values: torch.Tensor) -> bool:
        return values is self._values and values._version == self._version


_prepared: weakref.WeakKeyDictionary[Any, _Prepared] = weakref.WeakKeyDictionary()


def set_prepared(features: Any, batch: Batch) -> None:
    """Let collections use `batch` for this KeyedJaggedTensor, as long as its ids do not change."""
    _prepared[features] = _Prepared(batch, features.values())


def prepared_batch(features: Any) -> Batch | None:
    """Return the batch of `set_prepared`; None: there is none, or the ids have changed."""
    found = _prepared.get(features)
    return found.batch if found is not None and found.matches(features.values()) else None
