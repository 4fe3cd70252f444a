"""Builds the `Workload` and `Cluster` of a config, or of a model of Zhao et al. (MLSys 2020)."""

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
from thermocline.data.open_data import check_paths, open_data
from thermocline.data.paper_models import PaperModel
from thermocline.embedding.optimizers import SGD
from thermocline.embedding.row_statistics import RowStatistics
from thermocline.embedding.table import Table
from thermocline.embedding.table_spec import LookAheadLimits
from thermocline.errors import ConfigError
from thermocline.models import ModelConfig, build, row_dim
from thermocline.models.layers import Model
from thermocline.planner.cache_model import KeyDistribution
from thermocline.planner.cost_model import Cluster, DenseOptimizer, Workload
from thermocline.planner.dense_timing import CpuTime, DenseTiming, parallel_share, time_dense_network
from thermocline.planner.hardware import Hardware
from thermocline.planner.op_counter import count_ops, reference_network_seconds
from thermocline.tiers.dram import DramTier
from thermocline.training.run import row_optimizer
from thermocline.utils.text_format import parse_size

SAMPLE_EXAMPLES = 200_000
"""Examples of files that are read to count keys."""
_SAMPLE_IDS = 1_000_000
"""Ids of generated data that are generated to measure its cost."""
_HBM_OVERHEAD_BYTES = 40
"""Bytes per row of the HBM tier beside the row: index (two entries of 12.8 bytes per slot) and metadata."""
_PROBE_BUDGET = 16_000_000
"""Bytes of the DRAM tier that shows how many rows fit a budget."""
_PRESET_MEMORY_SHARE = 0.8
"""Fraction of a node's DRAM and HBM that a preset uses."""
_MAX_TIMED_MULTIPLY_ADDS = 5e9
"""Size of the batch with which a network is timed: about a quarter of a second of a core, for each of 20 steps."""


def preset_config(name: str, sets: Sequence[str] = ()) -> Config:
    """Config of model A to E of Zhao et al. (2020), scaled as `tc.SyntheticAds.preset`, with `key=value` overrides."""
    try:
        paper_model = PaperModel.parse(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    model = ModelConfig(
        name="dnn",
        dim=paper_model.dim,
        hidden=paper_model.hidden,
        dropout=0.0,
        batch_norm=False,
        embedding_l2=0.0,
    )
    data = Data(format="synth", synth=Synth(preset=name))
    config = Config(data=data, model=model, train=Train(optimizer="rowwise_adagrad", dense_optimizer="adam"))
    return Config.parse(config.to_toml(), sets, name=f"preset {name}")


def workload_of(config: Config, *, examples: int = SAMPLE_EXAMPLES) -> Workload:
    """Workload of one rank: reads or generates a sample of the data, and times the dense network.

    examples   examples of files that are read to count keys
    """
    config = config.resolve()
    train, optimizer = config.train, row_optimizer(config)
    dim = row_dim(config.model)
    data = _measure_data(config, examples)
    fields, dense = data.pop("fields"), data.pop("dense")
    dense_optimizer: Any = str(train.dense_optimizer).removeprefix("partial_").removeprefix("rowwise_")
    synced, syncs = sync_volume(config.dist.dense_sync, dense_optimizer)
    return Workload(
        name=config.data.synth.preset or config.model.name,
        fields=fields,
        dense_features=dense,
        dim=dim,
        row_bytes=config.precision.row_bytes(dim, optimizer) + config.rows.bytes,
        row_floats=dim + optimizer.state_floats(dim),
        batch=train.batch_size,
        window=train.pull_window,
        policy=config.tiers.policy,
        dense_optimizer=dense_optimizer,
        sync=config.dist.dense_sync.mode,
        sync_scope=config.dist.dense_sync.scope,
        synced=synced,
        syncs=syncs,
        hops=config.dist.hops,
        wire=config.dist.wire,
        **_measure_network(config.model, fields, dense, train.batch_size, dense_optimizer),
        **data,
    )


def sync_volume(sync: DenseSync, optimizer: DenseOptimizer) -> tuple[float, float]:
    """(floats averaged per dense parameter and step, all-reduces per step) in the steady state."""
    if sync.mode == "gradients":
        return 1.0, 1.0
    if sync.mode == "v_frozen" and optimizer != "adam":
        raise ConfigError(
            f'dist.dense_sync.merge "v_frozen" needs train.dense_optimizer "adam", not "{optimizer}"; "all" and '
            '"params" accept any optimizer'
        )
    x, m, v = sync.periods()
    all_periods = [x, m if optimizer == "adam" else None, v if optimizer != "sgd" else None]
    periods = [period for period in all_periods if period is not None]
    # Tensors that are averaged in the same step share one all-reduce: inclusion and exclusion over the periods.
    subsets = (subset for size in range(1, len(periods) + 1) for subset in itertools.combinations(periods, size))
    syncs = sum((-1) ** (len(subset) + 1) / math.lcm(*subset) for subset in subsets)
    return sum(1 / period for period in periods), syncs


def cluster_of(config: Config, work: Workload, node: Hardware, *, nodes: int, ranks: int | None) -> Cluster:
    """Cluster of `nodes` nodes with the tier budgets of the config, which are per rank.

    ranks   per node; default: one per GPU, or 1 without GPUs

    A preset uses 80 % of a node's DRAM and HBM instead of the budgets. Raise ConfigError if the config needs a GPU that
    the node lacks, or if the rows do not fit and there is no SSD tier.
    """
    gpu = None if config.tiers.device == "cpu" else node.gpu
    if gpu is None and config.tiers.device == "cuda":
        raise ConfigError(f'tiers.device is "cuda", but {node.name} has no GPU: set it to "auto" or "cpu"')
    ranks = ranks or (1 if gpu is None else gpu.count)
    tiers, is_preset = config.tiers, config.data.synth.preset is not None
    hbm = 0.0
    if is_preset:
        mem = _PRESET_MEMORY_SHARE * node.cpu.memory
        hbm = _PRESET_MEMORY_SHARE * gpu.memory if gpu is not None else 0.0
    else:
        mem = ranks * parse_size(tiers.mem, "tiers.mem")
        if gpu is not None:
            hbm = gpu.memory / 2 if tiers.hbm is None else parse_size(tiers.hbm, "tiers.hbm")
    ahead = None
    if is_preset or tiers.ssd is not None:
        ahead = LookAheadLimits.of(tiers.lookahead, int(mem / ranks), work.row_bytes)
        mem -= 0 if ahead is None else ranks * ahead.bytes
    mem_rows, num_keys = rows_in(config, work.dim, mem), work.key_distribution.num_keys
    if not is_preset and tiers.ssd is None and mem_rows * nodes < num_keys:
        raise ConfigError(
            f"tiers.mem of all ranks holds {nodes * mem_rows:,.0f} rows, but the data has {num_keys:,.0f} keys and "
            "tiers.ssd is not set: raise tiers.mem or set tiers.ssd"
        )
    hbm_rows = hbm / (work.row_bytes + _HBM_OVERHEAD_BYTES)
    return Cluster(nodes=nodes, ranks=ranks, gpu=gpu is not None, mem_rows=mem_rows, hbm_rows=hbm_rows, lookahead=ahead)


def rows_in(config: Config, dim: int, budget: float) -> float:
    """Rows that fit in `budget` bytes of DRAM, index and metadata included."""
    statistics = RowStatistics.of(config.rows.statistics)
    options: Any = {"precision": config.precision, "statistics": statistics, "threads": 1}
    tier = DramTier(dim, row_optimizer(config), budget=_PROBE_BUDGET, **options)
    return budget / _PROBE_BUDGET * tier.capacity


def _measure_data(config: Config, examples: int) -> dict[str, Any]:
    """Fields of `Workload` about the data, and its numbers of fields and dense features; reads a sample of it."""
    data, size = config.data, config.train.batch_size
    check_paths(data, ["train"])
    batches: Any = open_data(data, "train", batch_size=size, shuffle=False, labelled=None, tensors=False)
    shape = {"fields": batches.fields, "dense": batches.dense}
    generated = data.format == "synth"
    if generated and data.hashing is None:
        keys = KeyDistribution.zipf(batches.keys, batches.zipf, sum(batches.nonzeros) / 2)
        sample = max(2 * size, round(_SAMPLE_IDS / keys.ids_per_example))
        reader = _TimedReader(itertools.islice(batches, -(-sample // size)))
        for _ in reader:
            pass
        return {**shape, "key_distribution": keys, "read_ns": reader.nanoseconds_per_example}
    reader = _TimedReader(itertools.islice(batches, -(-examples // size)))
    _, counts = key_stats.count_keys(reader)
    return {
        **shape,
        "key_distribution": KeyDistribution.counted(counts, reader.examples),
        "read_ns": reader.nanoseconds_per_example,
        "example_bytes": 0.0 if generated else batches.bytes / max(1, batches.estimated_batches() * size),
    }


class _TimedReader:
    """Iterates over batches and measures the processor time of reading them."""

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
    def nanoseconds_per_example(self) -> float:
        return 1e9 * self._seconds / max(1, self.examples)


class _DenseNetwork(torch.nn.Module):
    """The part of a model after the embedding bag."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.model.score(rows)


def _measure_network(
    model: ModelConfig, fields: int, dense: int, batch: int, optimizer: DenseOptimizer
) -> dict[str, Any]:
    """Fields of `Workload` about the dense network: operations are counted, and its steps are timed on this machine."""
    dim = row_dim(model)
    table = Table(dim, SGD(lr=0.0), mem="1MB", device="cpu")
    built = build(model, table, fields, dense)
    vectors = fields + (bool(dense) if model.name == "dlrm" else dense)  # DLRM maps all dense features to one vector
    ops = count_ops(_DenseNetwork(built), lambda examples: torch.zeros(examples, vectors, dim))
    timed_batch = max(1, min(batch, round(_MAX_TIMED_MULTIPLY_ADDS / max(1.0, ops.multiply_adds))))
    threads = torch.get_num_threads()
    reference_before = reference_network_seconds()
    all_threads, one_thread = (
        time_dense_network(model, fields, dense, timed_batch, optimizer, count) for count in (threads, 1)
    )
    reference = (reference_before + reference_network_seconds()) / 2

    def step_time(timing: DenseTiming) -> CpuTime:
        """Time of a step of `batch` examples: the network scales with the batch, the optimizer does not."""
        scale = batch / timed_batch
        return CpuTime(
            total=scale * timing.network.total + timing.optimizer.total,
            caller=scale * timing.network.caller + timing.optimizer.caller,
        )

    return {
        "dense_time": step_time(all_threads).total / reference,
        "dense_parallel_share": parallel_share(step_time(all_threads), threads),
        "dense_time_1_thread": step_time(one_thread).total / reference,
        "multiply_adds": ops.multiply_adds,
        "floats": ops.floats,
        "step_floats": ops.step_floats,
        "dense_parameters": sum(parameter.numel() for parameter in built.parameters()),
    }
