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
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, get_args

from thermocline.arrays import Floats
from thermocline.batch import Batch
from thermocline.config.data import Split
from thermocline.config.schema import Config, OptimizerName, Tiers
from thermocline.data.features import Features
from thermocline.data.open_data import check_paths, has_split, open_data, require_local
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.launch import join_ranks, machine_world, world_size
from thermocline.embedding.initializers import Normal
from thermocline.embedding.optimizers import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad
from thermocline.embedding.table import Table
from thermocline.errors import ConfigError, DataError, LockError, NotFoundError
from thermocline.models import build, parameter_groups, row_dim
from thermocline.pipeline.prefetch import prefetch
from thermocline.training.callbacks import Callback, Row
from thermocline.training.run_dir import check_folder, config_of, has_begun, has_run, saved_by_ranks
from thermocline.training.state import Result
from thermocline.utils import atomic_file
from thermocline.utils.text_format import format_size, plural

if TYPE_CHECKING:
    import torch

    from thermocline.distributed.communicator import Groups

_ROW_OPTIMIZERS: dict[OptimizerName, Any] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": Adam,
}
_READ_ATTEMPTS = 10


def row_optimizer(config: Config) -> Optimizer:
    """Return the optimizer of the table; its weight decay is the model's L2 of rows."""
    optimizer: Optimizer = _ROW_OPTIMIZERS[config.train.optimizer](
        lr=config.train.lr, weight_decay=config.model.resolve().embedding_l2
    )
    return optimizer


def dense_optimizers(config: Config, model: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizer of the dense parameters in a list, which is empty if the model has none."""
    import torch

    train = config.resolve().train
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    kind = kinds[str(train.dense_optimizer).removeprefix("rowwise_")]
    if config.dist.dense_sync.mode == "v_frozen" and kind is torch.optim.Adam:
        from thermocline.distributed.frozen_adam import FrozenAdam

        kind = FrozenAdam
    groups = parameter_groups(config.model, model)
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


class Run:
    """The opened data, table and model of a config. `with tc.Run(tc.Config.load("ads.toml")) as run: run.fit()`.

    read_only   for evaluation: changes no file, and works while another process trains
    labelled    if False, files may lack the label
    recorded    splits whose files only the folder of the run names: URLs among them are not contacted

    Under torchrun, each process is one rank of the run, with a shard of the data and of the rows.
    """

    def __init__(
        self, config: Config, *, read_only: bool = False, labelled: bool = True, recorded: Collection[Split] = ()
    ) -> None:
        import torch

        self.config = config = config.resolve()
        self._labelled = labelled
        self._recorded = recorded
        self._loaders: dict[Split, Any] = {}
        self.features: Features | None = None
        """Features of the training data; None for generated data."""
        self.step = 0
        """Step of the checkpoint that `load` restored."""
        self.groups: Groups | None = None
        """Communicators of the ranks; None for a single process."""
        with contextlib.ExitStack() as undo:
            if not read_only and (world_size() > 1 or saved_by_ranks(config.train.run_dir)):
                self.groups = undo.enter_context(join_ranks(config.dist))
            fields, dense = self._open_data(read_only)
            torch.manual_seed(config.train.seed)
            try:
                self.table = self._table(read_only)
            except LockError as error:  # name the config key and the process, which is in the store's message
                holder = re.search(r"process (\d+)", str(error))
                raise atomic_file.lock_error(Path(config.tiers.ssd or ""), "tiers.ssd", holder and holder[1]) from None
            undo.callback(self.table.close)
            self.model = build(config.model, self.table, fields, dense)
            if self.table.hbm is not None:
                self.model.to(self.table.hbm.device)
            self.optimizers = dense_optimizers(config, self.model)
            if self._shard[0]:
                torch.manual_seed(config.train.seed + self._shard[0])  # equal models, different dropout
            undo.pop_all()

    def _table(self, read_only: bool) -> Table:
        config, tiers = self.config, self.config.tiers
        if tiers.ssd is not None and not read_only:
            atomic_file.make_writable(Path(tiers.ssd), "tiers.ssd")
        options: dict[str, Any] = {
            "hbm": None if read_only else gpu_budget(tiers, self._sharing_gpu()),
            "device": "cpu" if read_only else tiers.device,
            "mem": tiers.mem,
            "ssd": tiers.ssd,
            "seed": config.train.seed,
            "initial": Normal(scale=config.model.initial),
            "precision": config.precision,
            "policy": tiers.policy,
            "threads": tiers.threads,
            "ssd_mem": tiers.ssd_mem,
            "expected_keys": tiers.expected_keys,
            "on_damage": tiers.on_damage,
        }
        dim, optimizer = row_dim(config.model), row_optimizer(config)
        if self.groups is not None:
            from thermocline.distributed.sharded_table import ShardedTable

            hops, wire = config.dist.hops, config.dist.wire
            return ShardedTable(dim, optimizer, groups=self.groups, hops=hops, wire=wire, **options)
        if read_only and saved_by_ranks(config.train.run_dir):
            from thermocline.distributed.shard_reader import ShardReaderTable

            return ShardReaderTable(dim, optimizer, **options)
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
        saved = Path(self.config.train.run_dir) / "features.json"
        if data.format != "synth" and saved.exists() and has_run(self.config.train.run_dir):
            self.features = Features.load(saved)
        if read_only and self.features is not None:
            check_paths(data, ["test"])
            fields = len(self.features.fields)
            fields = fields if data.hashing is None else data.hashing.fields_of(fields)
            return fields, len(self.features.dense)
        if not has_split(data, "train"):
            raise ConfigError("data.train is missing: it must name at least one file")
        setting = self.config.train.needs_validation
        if setting and not has_split(data, "valid"):
            key = "data.synth.valid_examples" if data.format == "synth" else "data.valid"
            raise ConfigError(f"train.{setting} needs validation data: set {key}")
        check_paths(data, ["train", "valid", "test"])
        train = self.loader("train")
        self.features = getattr(train, "features", None)
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
            options: dict[str, Any] = {"batch_size": train.batch_size, "seed": train.seed, "labelled": self._labelled}
            self._loaders[split] = None
            if has_split(data, split):
                self._loaders[split] = self._open(split, {"features": self.features, **options})
        return self._loaders[split]

    def _open(self, split: Split, options: dict[str, Any]) -> Any:
        try:
            return open_data(self.config.data, split, shard=self._shard, **options)
        except DataError:
            if split == "train" or self._shard == (0, 1):
                raise
            # Too small for one shard per rank: rank 0 reads all of it.
            whole = open_data(self.config.data, split, **options)
            return whole if self._shard[0] == 0 else []

    # ---- training

    @property
    def device_text(self) -> str:
        """Description of the training device, for the log."""
        import torch

        if self.table.hbm is None:
            unused = "" if self.config.tiers.hbm is None else "; tiers.hbm has no effect without a GPU"
            return f"the CPU, {plural(torch.get_num_threads(), 'torch thread')}{unused}"
        device = self.table.hbm.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "an emulated GPU"
        return f"{name}, {format_size(self.table.hbm.budget)} of HBM for rows"

    def fit(self, *, resume: bool = False, callbacks: Sequence[Callback] = ()) -> Result:
        """Train, save and test; see `tc.Trainer.fit`. Takes an exclusive lock on the folder of the run."""
        runner, run_dir = CollectiveRunner.of([self.table]), Path(self.config.train.run_dir)
        with contextlib.ExitStack() as locks:
            runner.broadcast("locking the run folder", lambda: locks.enter_context(atomic_file.lock_dir(run_dir)))
            return self._fit(resume, callbacks)

    def _fit(self, resume: bool, callbacks: Sequence[Callback]) -> Result:
        from thermocline.training.trainer import Trainer

        config, run_dir = self.config, Path(self.config.train.run_dir)
        check_folder(config, resume=resume)
        files = _RunFiles(config, self.features)
        active = list(callbacks)
        if self._shard[0] == 0:
            if not has_run(run_dir):  # before the first checkpoint, which needs them
                files.write()
            active = [files, *callbacks]
        trainer = Trainer(
            self.model, self.optimizers, run_dir=run_dir, config=config.train, callbacks=active,
            dense_sync=config.dist.dense_sync,
        )  # fmt: skip
        restore = resume or has_begun(
            run_dir
        )  # a run without a checkpoint restarts from the initial state of its tables
        return trainer.fit(self.loader("train"), self.loader("valid"), self.loader("test"), resume=restore)

    # ---- trained runs

    @classmethod
    def load(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        checkpoint: int | str | None = None,
        config: Config | None = None,
        labelled: bool = True,
        recorded: Collection[Split] = (),
        allow_remote_data: bool = False,
    ) -> Self:
        """Open a trained run read-only, at its best checkpoint or else its last; or at a step or tag.

        config              replaces the config of the run; its data and tiers may differ
        recorded            splits of `config` that are from the folder of the run; without `config`, all are
        allow_remote_data   contact URLs that only the folder of the run names
        """
        if config is None:
            config, recorded = config_of(run_dir), get_args(Split)
        if not has_run(run_dir) and not has_begun(run_dir):
            raise NotFoundError(f"{run_dir} has no checkpoints: train it first")
        train = dataclasses.replace(config.train, run_dir=os.fspath(run_dir))
        run = cls(
            dataclasses.replace(config, train=train), read_only=True, labelled=labelled,
            recorded=() if allow_remote_data else recorded,
        )  # fmt: skip
        try:
            run.step = run.restore(checkpoint)
        except BaseException:
            run.close()
            raise
        return run

    def restore(self, checkpoint: int | str | None = None) -> int:
        """Load a checkpoint into model and table without changes on disk; return its step."""
        from thermocline.checkpoint.manager import Checkpoints

        for attempt in range(_READ_ATTEMPTS):
            checkpoints = Checkpoints(
                self.config.train.run_dir, [self.table], self.model, self.optimizers, read_only=True
            )
            try:
                selected = checkpoint
                if selected is None and any(saved.tag == "best" for saved in checkpoints.saved()):
                    selected = "best"
                restored = checkpoints.restore(None if selected == "last" else selected)
            except (NotFoundError, FileNotFoundError):
                # A training process may have replaced the checkpoint before it was read: try again.
                checkpoints.close()
                if attempt == _READ_ATTEMPTS - 1:
                    raise
                self.table.checkpoint_store = None
                continue
            if restored is None:
                raise NotFoundError(f"{self.config.train.run_dir} has nothing saved yet: wait for its first checkpoint")
            return restored.step
        raise AssertionError

    def evaluate(self, batches: Iterable[Batch]) -> Row:
        """Compute exact AUC, logloss, normalized entropy and calibration."""
        from thermocline.training.trainer import Trainer

        return Trainer(self.model).evaluate(batches)

    def scores(self, batches: Iterable[Batch]) -> Iterator[Floats]:
        """Yield the predicted probabilities, one array per batch, in order."""
        import torch

        self.model.eval()
        with torch.no_grad(), prefetch(batches, self.table, depth=self.config.train.depth, training=False) as ready:
            for batch in ready:
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
            atomic_file.atomic_write(run_dir / "features.json", json.dumps(self._features.to_json()).encode())
