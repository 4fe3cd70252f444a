"""`tc.Run`: the data, table, model and optimizers of a config, for training, evaluation and prediction.

run_dir/config.toml       the resolved config
run_dir/features.json     fields, dense features and their statistics in the training data
run_dir/metrics.jsonl     one line per event; the last line is the test
run_dir/tensorboard       the same metrics as scalars
run_dir/checkpoints ...   see checkpoint/manager.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, get_args

from thermocline.arrays import Floats
from thermocline.batch import Batch
from thermocline.config.data import Split
from thermocline.config.rank_rules import rank_settings
from thermocline.config.schema import Config, OptimizerName, Tiers
from thermocline.data.features import Features
from thermocline.data.follow import FileAgreement
from thermocline.data.open_data import check_paths, has_split, open_data, require_local, training_format
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.launch import join_ranks, machine_world, world_size
from thermocline.embedding.initializers import Normal
from thermocline.embedding.optimizers import SGD, Adagrad, Adam, Optimizer, PartialRowWiseAdam, RowWiseAdagrad
from thermocline.embedding.row_statistics import RowStatistics
from thermocline.embedding.table import Table
from thermocline.errors import ConfigError, DataError, LockError, NotFoundError
from thermocline.models import build, parameter_groups, row_dim
from thermocline.pipeline.prefetch import prefetch
from thermocline.training.callbacks import Callback, Row
from thermocline.training.run_dir import RunFolder, config_of, saved_by_ranks
from thermocline.training.run_restore import restore_for_reading, watermark_of
from thermocline.training.state import Result
from thermocline.utils import atomic_file
from thermocline.utils.lazy_dynamo import defer_dynamo
from thermocline.utils.machine import require_memory, reserve_memory
from thermocline.utils.startup import report_phase
from thermocline.utils.text_format import format_size, parse_size, plural

if TYPE_CHECKING:
    import torch

    from thermocline.distributed.communicator import Groups

_ROW_OPTIMIZERS: dict[OptimizerName, Any] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": Adam,
    "partial_rowwise_adam": PartialRowWiseAdam,
}


def row_optimizer(config: Config) -> Optimizer:
    """Return the optimizer of the table; its weight decay is the model's L2 of rows."""
    optimizer: Optimizer = _ROW_OPTIMIZERS[config.train.optimizer](
        lr=config.train.lr,
        weight_decay=config.model.resolve().embedding_l2,
        lazy=config.train.lazy,
        catch_up_steps=config.train.catch_up_steps,
    )
    return optimizer


def dense_optimizers(config: Config, model: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizer of the dense parameters in a list, which is empty if the model has none."""
    import torch

    train = config.resolve().train
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    kind = kinds[str(train.dense_optimizer).removeprefix("partial_").removeprefix("rowwise_")]
    if config.dist.dense_sync.mode == "v_frozen" and kind is torch.optim.Adam:
        from thermocline.distributed.frozen_adam import FrozenAdam

        kind = FrozenAdam
    groups = parameter_groups(config.model, model)
    if not train.compile:
        defer_dynamo()
    return [kind(groups, lr=train.dense_lr)] if groups else []


def gpu_budget(tiers: Tiers, sharing: int = 1) -> str | int | None:
    """Return the HBM budget for rows, or None without a GPU; `sharing` ranks use the same GPU."""
    import torch

    if tiers.device == "cpu":
        return None
    if not torch.cuda.is_available():
        if tiers.device == "cuda":
            raise ConfigError('tiers.device is "cuda", but torch sees no GPU: set it to "auto" or "cpu"')
        return None
    return torch.cuda.mem_get_info()[0] // (2 * sharing) if tiers.hbm is None else tiers.hbm


def _require_memory(config: Config) -> int:
    """Return the DRAM budgets; raise `ConfigError` if they exceed the memory of the machine."""
    tiers, counters = config.tiers, 0 if config.admission is None else config.admission.memory_bytes
    # Without a value, ssd_mem is derived from the memory of the machine.
    store = 0 if tiers.ssd is None or tiers.ssd_mem is None else parse_size(tiers.ssd_mem, "tiers.ssd_mem")
    name = "tiers.mem + tiers.ssd_mem" if store else "tiers.mem"
    name += " + admission.memory" if counters else ""
    needed = parse_size(tiers.mem, "tiers.mem") + store + counters
    try:
        require_memory(needed, name=name, override="tiers.mem_overcommit = true")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return needed


class Run:
    """The opened data, table and model of a config. `with tc.Run(tc.Config.load("ads.toml")) as run: run.fit()`.

    resume      whether `fit` will resume: an unsuitable folder is then an error before the data is opened. None: `fit`
                checks the folder
    read_only   for evaluation: changes no file, and works while another process trains
    labelled    if False, files may lack the label
    contiguous  over ranks, shards of the data are consecutive parts of the files
    recorded    splits whose files only the folder of the run names: URLs among them are not contacted
    carry       columns of the test data whose values its reader keeps for each batch (`Reader.carried`)

    Under torchrun, each process is one rank of the run, with a shard of the data and of the rows. All ranks raise
    `ConfigError` if their configs or data files differ, see `config/rank_rules.py`.
    """

    def __init__(
        self,
        config: Config,
        *,
        resume: bool | None = None,
        read_only: bool = False,
        labelled: bool = True,
        contiguous: bool = False,
        recorded: Collection[Split] = (),
        carry: Sequence[str] = (),
    ) -> None:
        self.config = config = config.resolve()
        budget = None if config.tiers.mem_overcommit else _require_memory(config)
        self._data_options = {"labelled": labelled, "contiguous": contiguous}
        self._recorded = recorded
        self._carry = carry
        self._loaders: dict[Split, Any] = {}
        self._identities: dict[str, Any] = {}
        """Data of each split as all ranks together read it."""
        self.features: Features | None = None
        """Features of the training data; None for generated data."""
        self.step = 0
        """Step of the checkpoint that `load` restored."""
        self.event_time: int | None = None
        """Watermark of that checkpoint: the largest event time trained; None: the data has no event times."""
        self.groups: Groups | None = None
        """Communicators of the ranks; None for a single process."""
        with contextlib.ExitStack() as undo:
            world, run_dir = world_size(), config.train.run_dir
            if world > 1 or (not read_only and saved_by_ranks(run_dir)):
                report_phase("connecting the ranks")
                self.groups = undo.enter_context(join_ranks(config.dist))
            same = {**rank_settings(config), "resume": resume}
            self._require_equal(same, "start all ranks with the same config and flags")
            self.folder = RunFolder.read(run_dir, self.runner)
            """State of the folder of the run when it was opened."""
            if read_only and not self.folder.has_run and not self.folder.has_begun:
                raise NotFoundError(f"{run_dir} has no checkpoints: train it first")
            if resume is not None:
                self.folder.check(config, resume=resume, runner=self.runner)
            self.changes: list[str] = []
            """Changes of the config since the run was saved, one text each; known when `fit` has locked the folder."""
            report_phase("opening the data")
            fields, dense = self.runner.run_all("opening the data", lambda: self._open_data(read_only))
            self._require_equal(self._identities, "all ranks must read the same files with the same settings")
            report_phase("loading torch")
            import torch

            torch.manual_seed(config.train.seed)
            report_phase("opening the table" if config.tiers.ssd is None else f"opening the store {config.tiers.ssd}")
            try:
                self.table = self._table(read_only)
            except LockError as error:  # name the config key and the process, which is in the store's message
                holder = re.search(r"process (\d+)", str(error))
                raise atomic_file.lock_error(Path(config.tiers.ssd or ""), "tiers.ssd", holder and holder[1]) from None
            undo.callback(self.table.close)
            if budget is not None:
                reserve_memory(self.table, repr(self.table.name), budget)
            report_phase("building the model")
            self.model = build(config.model, self.table, fields, dense)
            if self.table.hbm is not None:
                self.model.to(self.table.hbm.device)
            self.optimizers = dense_optimizers(config, self.model)
            if self._shard[0]:
                torch.manual_seed(config.train.seed + self._shard[0])  # equal models, different dropout
            undo.pop_all()

    @property
    def runner(self) -> CollectiveRunner:
        """Runs work on all ranks; for a single process, here only."""
        return CollectiveRunner(None if self.groups is None else self.groups.train)

    def _require_equal(self, settings: Mapping[str, Any], fix: str) -> None:
        if self.groups is not None:
            from thermocline.distributed.rank_agreement import flatten, require_equal

            require_equal(self.groups.train, flatten(settings), fix)

    def _table(self, read_only: bool) -> Table:
        config, tiers = self.config, self.config.tiers
        if config.expiry is not None:
            try:
                config.expiry.checked(RowStatistics.of(config.rows.statistics))
            except ValueError as error:
                raise ConfigError(str(error).replace("Expiry.", "expiry.")) from None
        if tiers.ssd is not None and not read_only:
            atomic_file.make_writable(Path(tiers.ssd), "tiers.ssd")
        options: dict[str, Any] = {
            "hbm": None if read_only else gpu_budget(tiers, self._sharing_gpu()),
            "device": "cpu" if read_only else tiers.device,
            "mem": tiers.mem,
            "mem_overcommit": True,  # __init__ has checked it, with the names of the config
            "ssd": tiers.ssd,
            "lookahead": tiers.lookahead,
            "seed": config.train.seed,
            "initial": Normal(scale=config.model.initial),
            "precision": config.precision,
            "statistics": config.rows.statistics,
            "expiry": None if read_only else config.expiry,
            "admission": config.admission,
            "policy": tiers.policy,
            "threads": tiers.threads,
            "ssd_mem": tiers.ssd_mem,
            "expected_keys": tiers.expected_keys,
            "on_damage": tiers.on_damage,
        }
        dim, optimizer = row_dim(config.model), row_optimizer(config)
        if read_only and (self.groups is not None or self.folder.saved_by_ranks):
            from thermocline.distributed.shard_reader import ShardReaderTable

            return ShardReaderTable(dim, optimizer, groups=self.groups, hops=config.dist.hops, **options)
        if self.groups is not None:
            from thermocline.distributed.sharded_table import ShardedTable

            hops, wire = config.dist.hops, config.dist.wire
            return ShardedTable(dim, optimizer, groups=self.groups, hops=hops, wire=wire, **options)
        return Table(dim, optimizer, ssd_options={"read_only": True} if read_only else None, **options)

    def _sharing_gpu(self) -> int:
        import torch

        if self.groups is None or not torch.cuda.is_available():
            return 1
        return -(-machine_world(self.groups.topology) // torch.cuda.device_count())

    @property
    def _shard(self) -> tuple[int, int]:
        """Index of this rank's shard of the data, and the number of shards."""
        return (0, 1) if self.groups is None else (self.groups.topology.rank, self.groups.topology.world)

    def _open_data(self, read_only: bool) -> tuple[int, int]:
        """Open all splits, so that errors appear before training; return the numbers of fields and dense features."""
        data = self.config.data
        if data.format != "synth" and self.folder.features is not None:
            self.features = Features.from_json(self.folder.features)
        if read_only and self.features is not None:
            check_paths(data, ["test"])
            if self.groups is not None:  # its files are compared over ranks
                self.loader("test")
            fields = len(self.features.fields)
            fields = fields if data.hashing is None else data.hashing.fields_of(fields)
            return fields, len(self.features.dense)
        if not has_split(data, "train"):
            raise ConfigError("data.train is missing: it must name at least one file")
        setting = self.config.train.expects_validation
        if setting and not has_split(data, "valid"):
            key = "data.synth.valid_examples" if data.format == "synth" else "data.valid"
            raise ConfigError(f"train.{setting} needs validation data: set {key}")
        check_paths(data, ["train", "valid", "test"])
        train = self.loader("train")
        self.features = getattr(train, "features", None)
        if self.features is not None and self.features.format is None:
            self.features = dataclasses.replace(self.features, format=training_format(data))
        held_out: tuple[Split, ...] = ("valid", "test")
        for split in held_out:
            if split not in self._recorded:
                self.loader(split)
        return train.fields, train.dense

    def loader(self, split: Split) -> Any:
        """Return the batches of a split, or None if the config has no data for it."""
        if split not in self._loaders:
            if split in self._recorded:
                require_local(self.config.data, split, self.config.train.run_dir)
            data, train = self.config.data, self.config.train
            options: dict[str, Any] = {"batch_size": train.batch_size, "seed": train.seed, **self._data_options}
            self._loaders[split] = None
            if has_split(data, split):
                carry = self._carry if split == "test" else ()
                self._loaders[split] = self._open(split, {"features": self.features, "carry": carry, **options})
        return self._loaders[split]

    def _open(self, split: Split, options: dict[str, Any]) -> Any:
        try:
            agreement = self._file_agreement() if split == "train" else None
            opened: Any = open_data(self.config.data, split, shard=self._shard, agreement=agreement, **options)
        except DataError:
            if split == "train" or self._shard == (0, 1):
                raise
            # Too small for one shard per rank: rank 0 reads all of it.
            whole = open_data(self.config.data, split, **options)
            opened = whole if self._shard[0] == 0 else []
            self._identities[f"data.{split}"] = whole.identity
        else:
            self._identities[f"data.{split}"] = opened.identity
        return opened

    def _file_agreement(self) -> FileAgreement | None:
        if self.groups is None or self.groups.topology.world == 1 or not self.config.data.follow:
            return None
        from thermocline.distributed.file_agreement import RankFiles

        return RankFiles(self.groups)

    # ---- training

    @property
    def device_text(self) -> str:
        """Description of the training device, for the log."""
        import torch

        from thermocline.training.dense_step import dense_device, precision_text

        device, train = dense_device(self.model, [self.table]), self.config.train
        dense = precision_text(train.dense_precision, train.compile, device)
        dense = f", {dense}" if dense else ""
        if self.table.hbm is None:
            unused = "" if self.config.tiers.hbm is None else "; tiers.hbm has no effect without a GPU"
            return f"the CPU, {plural(torch.get_num_threads(), 'torch thread')}{dense}{unused}"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "an emulated GPU"
        return f"{name}, {format_size(self.table.hbm.budget)} of HBM for rows{dense}"

    def fit(
        self,
        *,
        resume: bool = False,
        callbacks: Sequence[Callback] = (),
        on_locked: Callable[[], None] = lambda: None,
    ) -> Result:
        """Train, save and test; see `tc.Trainer.fit`. Takes an exclusive lock on the folder of the run.

        on_locked   called when the folder is locked and checked, before anything in it changes; `changes` is known
        """
        run_dir = Path(self.config.train.run_dir)
        with contextlib.ExitStack() as locks:
            self.runner.broadcast("locking the run folder", lambda: self._lock(locks, run_dir))
            return self._fit(resume, callbacks, on_locked)

    @staticmethod
    def _lock(locks: contextlib.ExitStack, run_dir: Path) -> None:
        locks.enter_context(atomic_file.lock_dir(run_dir))

    def _fit(self, resume: bool, callbacks: Sequence[Callback], on_locked: Callable[[], None]) -> Result:
        from thermocline.training.trainer import Trainer

        config, run_dir = self.config, Path(self.config.train.run_dir)
        folder = RunFolder.read(run_dir, self.runner)  # again, under the lock
        self.changes = folder.check(config, resume=resume, runner=self.runner)
        on_locked()
        files = _RunFiles(config, self.features)
        active = list(callbacks)
        if self._shard[0] == 0:
            if not folder.has_run:  # before the first checkpoint, which needs them
                files.write()
            active = [files, *callbacks]
        active += self._publishers()
        trainer = Trainer(
            self.model, self.optimizers, run_dir=run_dir, config=config.train, callbacks=active,
            dense_sync=config.dist.dense_sync,
        )  # fmt: skip
        if folder.has_run:
            report_phase("restoring the checkpoint")
        restore = resume or folder.has_begun  # without a checkpoint: from the initial state of the tables
        return trainer.fit(self.loader("train"), self.loader("valid"), self.loader("test"), resume=restore)

    def _publishers(self) -> list[Callback]:
        from thermocline.training.publisher import Publisher
        from thermocline.training.scoring import scoring_files

        if self.config.publish.folder is None:
            return []
        try:
            return [Publisher(self.config.publish, self.table, lambda: scoring_files(self), self.config.expiry)]
        except ValueError as error:
            raise ConfigError(f"publish.{error}") from None

    # ---- trained runs

    @classmethod
    def load(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        checkpoint: int | str | None = None,
        config: Config | None = None,
        labelled: bool = True,
        contiguous: bool = False,
        recorded: Collection[Split] = (),
        allow_remote_data: bool = False,
        carry: Sequence[str] = (),
    ) -> Self:
        """Open a trained run read-only, at its best checkpoint or else its last; or at a step or tag.

        config              replaces the config of the run; its data and tiers may differ
        recorded            splits of `config` that are from the folder of the run; without `config`, all are
        allow_remote_data   contact URLs that only the folder of the run names
        carry               columns of the test data whose values its reader keeps for each batch

        Under torchrun, any number of ranks share the rows and the data, also of a run trained by another number.
        """
        if config is None:
            config, recorded = config_of(run_dir), get_args(Split)
        train = dataclasses.replace(config.train, run_dir=os.fspath(run_dir))
        config = dataclasses.replace(config, train=train)
        recorded = () if allow_remote_data else recorded
        run = cls(config, read_only=True, labelled=labelled, contiguous=contiguous, recorded=recorded, carry=carry)
        try:
            run.step = run.restore(checkpoint)
        except BaseException:
            run.close()
            raise
        return run

    def restore(self, checkpoint: int | str | None = None) -> int:
        """Load a checkpoint into model and table without changes on disk; return its step. Collective over ranks."""
        run_dir = Path(self.config.train.run_dir)
        restored = restore_for_reading(run_dir, self.table, self.model, self.optimizers, checkpoint)
        self.event_time = watermark_of(restored)
        return restored.step

    def evaluate(self, batches: Iterable[Batch]) -> Row:
        """Compute exact AUC, logloss, normalized entropy and calibration."""
        from thermocline.training.trainer import Trainer

        return Trainer(self.model).evaluate(batches)

    def scores(self, batches: Iterable[Batch]) -> Iterator[Floats]:
        """Yield the predicted probabilities, one array per batch, in order. Collective over ranks."""
        import torch

        self.model.eval()
        with torch.no_grad(), prefetch(batches, self.table, depth=self.config.train.depth, training=False) as ready:
            for batch in ready:
                if batch.examples:  # over ranks, a rank whose data has ended gets empty batches
                    yield torch.sigmoid(self.model(batch)).cpu().numpy()

    def close(self, *, failed: bool = False) -> None:
        """Close the table and the communicators; with `failed`, without waiting for other ranks."""
        try:
            self.table.close()
        finally:
            if self.groups is not None:
                self.groups.close(failed=failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


class _RunFiles(Callback):
    """Writes config.toml and features.json after a successful restore: a failed resume keeps the files of the run."""

    def __init__(self, config: Config, features: Features | None) -> None:
        self._config, self._features = config, features

    def on_start(self, trainer: Any) -> None:
        self.write()

    def write(self) -> None:
        run_dir = Path(self._config.train.run_dir)
        atomic_file.make_folder(run_dir)
        atomic_file.atomic_write(run_dir / "config.toml", self._config.with_absolute_ssd().to_toml().encode())
        if self._features is not None:
            atomic_file.atomic_write(run_dir / "features.json", json.dumps(self._features.saved()).encode())
