"""What a config or one of the source's models asks for: a `Workload`."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from thermocline.batch import Batch
from thermocline.config.data import Data, Synth
from thermocline.config.dense_sync import DenseSync
from thermocline.config.schema import Config, Train
from thermocline.data import key_stats
from thermocline.data.open import check_paths, open_data
from thermocline.data.paper_models import Plan
from thermocline.embedding.optimizers import SGD
from thermocline.embedding.table import Table
from thermocline.errors import ConfigError
from thermocline.models import ModelConfig, build, row_dim
from thermocline.models.layers import Model
from thermocline.planner.cache_model import Popularity
from thermocline.planner.cost_model import Cluster, DenseOptimizer, Workload
from thermocline.planner.dense_timing import Inside, Timed, inside_training, shared
from thermocline.planner.hardware import Hardware
from thermocline.planner.op_counter import reference_seconds, work_of
from thermocline.tiers.dram import DramTier
from thermocline.training.run import row_optimizer
from thermocline.utils.text_format import parse_size

SAMPLE = 200_000
"""Examples of files that are read to count keys."""
_HBM_BYTES_PER_ROW = 40
"""Index (two entries of 12.8 bytes per slot) and metadata beside a row on the GPU."""
_TIMED = 2e10
"""Multiply-adds that a network is timed with, at most: a second's work of a core."""
_SAMPLE_IDS = 1_000_000
"""Ids of generated data that are made up to see what that costs."""


def preset_config(name: str, sets: Sequence[str] = ()) -> Config:
    """The config of the source's model A to E, at a scale (see `tc.SyntheticAds.preset`), changed by overrides."""
    try:
        plan = Plan.of(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    model = ModelConfig(name="dnn", dim=plan.dim, hidden=plan.hidden, dropout=0.0, batch_norm=False, embedding_l2=0.0)
    data = Data(format="synth", synth=Synth(preset=name))
    made = Config(data=data, model=model, train=Train(optimizer="rowwise_adagrad", dense_optimizer="adam"))
    return Config.parse(made.to_toml(), sets, name=f"preset {name}")


def workload_of(config: Config, *, examples: int = SAMPLE) -> Workload:
    """Of one rank; keys of files are counted in the first `examples`."""
    config = config.resolve()
    train, optimizer = config.train, row_optimizer(config)
    dim = row_dim(config.model)
    data = _data(config, examples)
    fields, dense = data.pop("fields"), data.pop("dense")
    kind: Any = str(train.dense_optimizer).removeprefix("rowwise_")
    synced, syncs = averaged(config.dist.dense_sync, kind)
    return Workload(
        name=config.data.synth.preset or config.model.name,
        fields=fields,
        dim=dim,
        row_bytes=config.precision.row_bytes(dim, optimizer),
        row_floats=dim + optimizer.state_floats(dim),
        batch=train.batch_size,
        window=train.pull_window,
        policy=config.tiers.policy,
        dense_optimizer=kind,
        sync=config.dist.dense_sync.mode,
        synced=synced,
        syncs=syncs,
        hops=config.dist.hops,
        wire=config.dist.wire,
        **network_of(config.model, fields, dense, train.batch_size, kind),
        **data,
    )


def averaged(sync: DenseSync, optimizer: DenseOptimizer) -> tuple[float, float]:
    """Per step, once a run is under way: numbers averaged per dense parameter, and how often any are."""
    if sync.mode == "gradients":
        return 1.0, 1.0
    if sync.mode == "v_frozen" and optimizer != "adam":
        raise ConfigError(
            f'dist.dense_sync.merge "v_frozen" needs train.dense_optimizer "adam", not "{optimizer}"; "all" and '
            '"params" take any'
        )
    x, m, v = sync.periods()
    periods = [x, m if optimizer == "adam" else None, v if optimizer != "sgd" else None]
    due = [period for period in periods if period is not None]
    # Merges that fall on one step are one message: inclusion and exclusion over the periods.
    groups = (group for size in range(1, len(due) + 1) for group in itertools.combinations(due, size))
    return sum(1 / period for period in due), sum((-1) ** (len(group) + 1) / math.lcm(*group) for group in groups)


def cluster_of(config: Config, work: Workload, node: Hardware, *, nodes: int, ranks: int | None) -> Cluster:
    """Nodes with the config's budgets, which are a rank's; a model of the source gets 80 % of a node's memories."""
    gpu = None if config.tiers.device == "cpu" else node.gpu
    if gpu is None and config.tiers.device == "cuda":
        raise ConfigError(f'tiers.device is "cuda", but {node.name} has no GPU: it may be "auto" or "cpu"')
    count = ranks or (1 if gpu is None else gpu.count)
    tiers, whole = config.tiers, config.data.synth.preset is not None
    mem = 0.8 * node.cpu.memory if whole else count * parse_size(tiers.mem, "tiers.mem")
    hbm = 0.0
    if gpu is not None:
        given = gpu.memory / 2 if tiers.hbm is None else parse_size(tiers.hbm, "tiers.hbm")
        hbm = 0.8 * gpu.memory if whole else given
    rows = _rows_in(config, work.dim, mem)
    if not whole and tiers.ssd is None and rows * nodes < work.popularity.keys:
        raise ConfigError(
            f"tiers.mem of all ranks holds {nodes * rows:,.0f} rows, but there are {work.popularity.keys:,.0f} keys "
            "and no tiers.ssd: give more of one or the other"
        )
    hbm_rows = hbm / (work.row_bytes + _HBM_BYTES_PER_ROW)
    return Cluster(nodes=nodes, ranks=count, gpu=gpu is not None, mem_rows=rows, hbm_rows=hbm_rows)


def _rows_in(config: Config, dim: int, budget: float) -> float:
    """Rows that so many bytes of memory hold, index and metadata counted."""
    probe = 16_000_000
    tier = DramTier(dim, row_optimizer(config), budget=probe, threads=1, precision=config.precision)
    return budget / probe * tier.capacity


def _data(config: Config, examples: int) -> dict[str, Any]:
    """Which keys come how often, and what reading costs here: some of the data is read."""
    data, size = config.data, config.train.batch_size
    check_paths(data, ["train"])
    batches: Any = open_data(data, "train", batch_size=size, shuffle=False, labelled=None, tensors=False)
    out = {"fields": batches.fields, "dense": batches.dense}
    made_up = data.format == "synth"
    if made_up and data.hashing is None:
        popularity = Popularity.zipf(batches.keys, batches.zipf, sum(batches.nonzeros) / 2)
        wanted = max(2 * size, round(_SAMPLE_IDS / popularity.nonzeros))
        read = _Timed(itertools.islice(batches, -(-wanted // size)))
        for _ in read:
            pass
        return {**out, "popularity": popularity, "read_ns": read.nanoseconds}
    read = _Timed(itertools.islice(batches, -(-examples // size)))
    _, counts = key_stats.count(read)
    stored = 0.0 if made_up else batches.bytes / max(1, batches.estimated_batches() * size)
    popularity = Popularity.counted(counts, read.examples)
    return {**out, "popularity": popularity, "read_ns": read.nanoseconds, "example_bytes": stored}


class _Timed:
    """Batches, and the processor time that reading them took."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)
        self._seconds = 0.0
        self.examples = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            start = time.process_time()
            batch = next(self._batches, None)
            self._seconds += time.process_time() - start
            if batch is None:
                return
            self.examples += batch.examples
            yield batch

    @property
    def nanoseconds(self) -> float:
        """Per example."""
        return 1e9 * self._seconds / max(1, self.examples)


class _Score(torch.nn.Module):
    """A model from the rows on: all that is neither keys nor tables."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.model.score(rows)


def network_of(model: ModelConfig, fields: int, dense: int, batch: int, optimizer: DenseOptimizer) -> dict[str, Any]:
    """What of a `Workload` is its model's network."""
    dim = row_dim(model)
    table = Table(dim, SGD(lr=0.0), mem="1MB", device="cpu")
    built = build(model, table, fields, dense)
    vectors = fields + (bool(dense) if model.name == "dlrm" else dense)  # DLRM makes one vector of all dense features
    counted = work_of(_Score(built), lambda examples: torch.zeros(examples, vectors, dim))
    timed = max(1, min(batch, round(_TIMED / max(1.0, counted.multiply_adds))))
    threads = torch.get_num_threads()
    before = reference_seconds()
    found, alone = (inside_training(model, fields, dense, timed, optimizer, count) for count in (threads, 1))
    usual = (before + reference_seconds()) / 2

    def whole(parts: Inside) -> Timed:
        """Of a step of `batch` examples."""
        return Timed(*(batch / timed * each + once for each, once in zip(parts.network, parts.optimizer, strict=True)))

    return {
        "network": whole(found).seconds / usual,
        "network_shared": shared(whole(found), threads),
        "network_alone": whole(alone).seconds / usual,
        "multiply_adds": counted.multiply_adds,
        "floats": counted.floats,
        "step_floats": counted.step_floats,
        "dense_parameters": sum(parameter.numel() for parameter in built.parameters()),
    }
