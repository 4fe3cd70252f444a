"""Scoring of whole examples with a published version: its rows, and the dense model that it was published with.

A version has the dense model as three files: `config.toml`, `features.json` and `dense.safetensors`. The model is built
from the config and loads its weights from safetensors. A graph of torch.export or TorchScript would be read by
unpickling, which a publication from elsewhere must not reach.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from thermocline.arrays import Floats, Keys
from thermocline.batch import Batch
from thermocline.config.publish import Publish
from thermocline.config.schema import Config, Tiers, Train
from thermocline.data.features import Features
from thermocline.data.open_data import training_format
from thermocline.data.record_batches import ColumnFormat, RecordBatchConverter
from thermocline.data.request_size import require_size
from thermocline.embedding.initializers import Normal
from thermocline.embedding.optimizers import SGD
from thermocline.embedding.table import Table
from thermocline.embedding.table_spec import TableSpec
from thermocline.errors import CorruptionError, NotFoundError
from thermocline.models import ModelConfig, build, row_dim
from thermocline.serving.snapshot import State, find
from thermocline.serving.version import read_file
from thermocline.tiers.dram_backend import DramBackend

if TYPE_CHECKING:
    from thermocline.training.run import Run

CONFIG, FEATURES, DENSE = "config.toml", "features.json", "dense.safetensors"
_MAX_BYTES = {CONFIG: 1 << 20, FEATURES: 1 << 26, DENSE: 1 << 32}
"""Largest files of a version that are read."""
_MAX_LAYERS = 1000
"""Layers of one kind that a published model may have."""
MAX_IDS = 1 << 22
"""Ids of one request to score: those of all columns together."""
MAX_TEXT = 1 << 28
"""Bytes of text of one request to score."""


def scoring_files(run: Run) -> dict[str, bytes]:
    """Return the files of the dense model for a version of the run, by name.

    Empty for data without named columns (generated, LibSVM and LibFFM): its examples cannot be sent as columns.
    """
    import safetensors.torch

    config = run.config
    if run.features is None:
        return {}
    format: Any = run.features.format or training_format(config.data)  # files of a stream may be deleted by now
    if format not in get_args(ColumnFormat):
        return {}
    data = dataclasses.replace(config.data, format=format, train=(), valid=(), test=())
    published = dataclasses.replace(
        config, data=data, tiers=Tiers(), train=Train(), publish=Publish()
    )  # no paths of this machine
    weights = {name: value.contiguous().cpu() for name, value in _dense_state(run.model).items()}
    return {
        CONFIG: published.to_toml().encode(),
        FEATURES: json.dumps(run.features.to_json(), indent=1).encode() + b"\n",
        DENSE: safetensors.torch.save(weights),
    }


def _dense_state(model: Any) -> dict[str, Any]:
    """Return the state of the model without the descriptions of its tables."""
    state = model.state_dict()
    return {name: value for name, value in state.items() if not name.endswith("_extra_state")}


class Scorer:
    """Scores examples with versions of one publication. Thread safety: calls wait for each other."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._loaded: _Model | None = None

    def __call__(self, state: State, table: Any) -> Floats:
        """Return float32[examples]: the probability of each row of an Arrow table, by the rows of `state`."""
        import torch

        with self._lock:
            model = self._model(state)
            require_size(table, model.separators, max_ids=MAX_IDS, max_text=MAX_TEXT)
            batch = model.converter.batch(table)
            model.rows.state = state
            with torch.no_grad():
                return np.asarray(torch.sigmoid(model.module(_as_tensors(batch))).numpy())

    def load(self, state: State) -> None:
        """Load the dense model of a version before its first request. Raises if it has none."""
        with self._lock:
            self._model(state)

    def _model(self, state: State) -> _Model:
        """Return the model with the weights of a version."""
        import safetensors.torch

        number = state.version.number
        if self._loaded is not None and self._loaded.number == number:
            return self._loaded
        if not {CONFIG, FEATURES, DENSE} <= {file.name for file in state.version.files}:
            raise NotFoundError(
                f"version {number} of {self._path} has no dense model: publish with `thermocline export` from a run on "
                f"{', '.join(get_args(ColumnFormat))} data"
            )
        folder = self._path / state.version.folder
        files = [file for file in state.version.files if file.name in _MAX_BYTES]
        for file in files:
            if file.bytes > (limit := _MAX_BYTES[file.name]):
                raise CorruptionError(f"{folder / file.name} has {file.bytes} bytes: it must have at most {limit}")
        content = {file.name: read_file(folder, file) for file in files}
        if self._loaded is None or self._loaded.settings != _settings(content, state):
            self._loaded = _Model.build(content, folder, state)
        try:
            missing, unexpected = self._loaded.module.load_state_dict(
                safetensors.torch.load(content[DENSE]), strict=False
            )
        except Exception as error:
            self._loaded = None
            raise CorruptionError(f"{folder}/{DENSE} does not fit {CONFIG}: publish this version again") from error
        if unexpected or any(not name.endswith("_extra_state") for name in missing):
            self._loaded = None
            raise CorruptionError(f"{folder}/{DENSE} does not fit {CONFIG}: publish this version again")
        self._loaded.number = number
        return self._loaded


@dataclasses.dataclass(slots=True)
class _Model:
    """A built model that reads rows of a version."""

    settings: tuple[Any, ...]
    """See `_settings`."""
    module: Any
    rows: _VersionRows
    converter: RecordBatchConverter
    separators: Mapping[str, str]
    """Separators of the columns whose text has several ids."""
    number: int = -1
    """The version of its dense weights."""

    @classmethod
    def build(cls, content: Mapping[str, bytes], folder: Path, state: State) -> _Model:
        config = Config.parse(content[CONFIG].decode(), name=f"{folder}/{CONFIG}")
        features = Features.from_json(json.loads(content[FEATURES]))
        (table_name,) = state.tables
        if row_dim(config.model) != state.tables[table_name].dim:
            raise CorruptionError(
                f"{folder}/{CONFIG} has rows of {row_dim(config.model)} weights, the version has "
                f"{state.tables[table_name].dim}: publish this version again"
            )
        backends: list[_VersionRows] = []

        def make_backend(spec: TableSpec, device: str, epoch: int | None) -> _VersionRows:
            backends.append(_VersionRows(spec))
            return backends[0]

        table = Table(
            row_dim(config.model), SGD(lr=1.0), mem="16MB", name=table_name, make_backend=make_backend,
            seed=state.tables[table_name].seed, initial=Normal(scale=config.model.initial), precision=config.precision,
        )  # fmt: skip
        fields, hashing = len(features.fields), config.data.hashing
        fields = fields if hashing is None else hashing.fields_of(fields)
        _require_sizes(config.model, table, fields, len(features.dense), content[DENSE], folder)
        module = build(config.model, table, fields, len(features.dense))
        module.eval()
        converter = RecordBatchConverter(config.data, features)
        return cls(_settings(content, state), module, backends[0], converter, config.data.separators)


def _require_sizes(model: ModelConfig, table: Table, fields: int, dense: int, weights: bytes, folder: Path) -> None:
    """Raise `CorruptionError` unless the file of weights has the parameters of the model. Allocates none of them.

    A config from elsewhere can name layers of any size; the file with their weights is read, and so it bounds them.
    """
    import safetensors.torch
    import torch

    damaged = CorruptionError(f"{folder}/{DENSE} does not have the sizes of {CONFIG}: publish this version again")
    try:
        stored = {name: tuple(value.shape) for name, value in safetensors.torch.load(weights).items()}
    except Exception as error:
        raise damaged from error
    layers = max(len(model.hidden), len(model.bottom), model.cross_layers or 0, model.attention_layers)
    if layers > _MAX_LAYERS:
        raise damaged
    try:
        with torch.device("meta"):
            state = _dense_state(build(model, table, fields, dense))
        expected = {name: tuple(value.shape) for name, value in state.items()}
    except Exception as error:  # sizes that overflow
        raise damaged from error
    if stored != expected:
        raise damaged


def _settings(content: Mapping[str, bytes], state: State) -> tuple[Any, ...]:
    """Return what a model is built from; versions that differ in their weights only share it."""
    seeds = [(name, file.seed) for name, file in state.tables.items()]
    return content[CONFIG], content[FEATURES], *seeds


class _VersionRows(DramBackend):
    """Reads the rows of a version. A key without a row gets the value that evaluation gives it."""

    state: State

    def read(self, keys: Keys) -> Floats:
        (file,) = self.state.tables.values()
        if file.initial is not None or file.shared_key is not None:
            return find(self.state, keys, None, "initial")[0]
        # Rows below fp32 begin rounded, which the settings of the run repeat.
        rows, found = find(self.state, keys, None, "zero")
        unseen = keys[~found]
        if len(unseen) and self.spec.precision.scale_lr > 0:
            raise ValueError(
                f"{len(unseen)} keys have no row, first {unseen[0]}: their initial rows are unknown, because the run "
                "trains the scale of weights (precision.scale_lr)"
            )
        rows[~found] = self.host.dram.initial_rows(unseen)[:, : self.spec.dim]
        return rows


def _as_tensors(batch: Batch) -> Batch:
    import torch

    if batch.dense is not None:
        batch.dense = torch.from_numpy(batch.dense)
    return batch
