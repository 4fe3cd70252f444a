"""`tc.Run`: a config made real. Its data, table, model and optimizers; trained, evaluated, read.

run_dir/config.toml       the config, everything filled in
run_dir/features.json     fields, dense features and their statistics, as the training data had them
run_dir/metrics.jsonl     one line per event; the last is the test's
run_dir/tensorboard       the same as scalars
run_dir/checkpoints ...   see checkpoint.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from thermocline.batch import Batch, Floats
from thermocline.config.data import Split
from thermocline.config.schema import Config, OptimizerName, Tiers
from thermocline.data.features import Features
from thermocline.data.open import check_paths, has_split, open_data
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.launch import join_ranks, local_world, topology_of
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
_READ_TRIES = 10


def row_optimizer(config: Config) -> Optimizer:
    """Of the table: the model's L2 of rows is its weight decay."""
    made: Optimizer = _ROW_OPTIMIZERS[config.train.optimizer](
        lr=config.train.lr, weight_decay=config.model.resolve().embedding_l2
    )
    return made


def dense_optimizers(config: Config, model: Any) -> list[torch.optim.Optimizer]:
    """Of the dense parameters; none if there are none."""
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
    """Bytes of the GPU for rows; none: there is no GPU to use. `sharing`: ranks that use the same one."""
    import torch

    if tiers.device == "cpu":
        return None
    if not torch.cuda.is_available():
        if tiers.device == "cuda":
            raise ConfigError('tiers.device is "cuda", but torch sees no GPU: it may be "auto" or "cpu"')
        return None
    return torch.cuda.mem_get_info()[0] // (2 * sharing) if tiers.hbm is None else tiers.hbm


class Run:
    """Everything a config names, opened. `with tc.Run(tc.Config.load("ads.toml")) as run: run.fit()`.

    read_only   to evaluate what was trained: changes nothing, and may be used while another process trains
    labelled    False: files may lack the label

    Started by torchrun, each process is one rank of the run, with its own part of the data and of the rows.
    """

    def __init__(self, config: Config, *, read_only: bool = False, labelled: bool = True) -> None:
        import torch

        self.config = config = config.resolve()
        self._labelled = labelled
        self._loaders: dict[Split, Any] = {}
        self.features: Features | None = None
        """Of the training data; none: it is generated."""
        self.step = 0
        """Of the checkpoint that `load` restored."""
        self.groups: Groups | None = None
        """The ranks of the run; none: it is this process's alone."""
        with contextlib.ExitStack() as undo:
            if not read_only and (topology_of(config.dist).world > 1 or saved_by_ranks(config.train.run_dir)):
                self.groups = undo.enter_context(join_ranks(config.dist))
            fields, dense = self._open_data(read_only)
            torch.manual_seed(config.train.seed)
            try:
                self.table = self._table(read_only)
            except LockError as error:  # the store has the words of a library; who holds it is in them
                who = re.search(r"process (\d+)", str(error))
                raise atomic_file.lock_error(Path(config.tiers.ssd or ""), "tiers.ssd", who and who[1]) from None
            undo.callback(self.table.close)
            self.model = build(config.model, self.table, fields, dense)
            if self.table.hbm is not None:
                self.model.to(self.table.hbm.device)
            self.optimizers = dense_optimizers(config, self.model)
            if self._shard[0]:
                torch.manual_seed(config.train.seed + self._shard[0])  # the same model, but every rank drops out others
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
        }
        dim, optimizer = row_dim(config.model), row_optimizer(config)
        if self.groups is not None:
            from thermocline.distributed.sharded_table import ShardedTable

            hops, wire = config.dist.hops, config.dist.wire
            return ShardedTable(dim, optimizer, groups=self.groups, hops=hops, wire=wire, **options)
        if read_only and saved_by_ranks(config.train.run_dir):
            from thermocline.distributed.shard_reader import JoinedTable

            return JoinedTable(dim, optimizer, **options)
        return Table(dim, optimizer, ssd_options={"read_only": True} if read_only else None, **options)

    def _sharing_gpu(self) -> int:
        import torch

        if self.groups is None or not torch.cuda.is_available():
            return 1
        return -(-local_world(self.groups.topology) // torch.cuda.device_count())

    @property
    def _shard(self) -> tuple[int, int]:
        """This rank's part of the data."""
        return (0, 1) if self.groups is None else (self.groups.topology.rank, self.groups.topology.world)

    def _open_data(self, read_only: bool) -> tuple[int, int]:
        """All that will be read, so that what is wrong with it shows at once; returns fields and dense features."""
        data = self.config.data
        saved = Path(self.config.train.run_dir) / "features.json"
        if data.format != "synth" and saved.exists() and has_run(self.config.train.run_dir):
            self.features = Features.from_json(json.loads(saved.read_text()))
        if read_only and self.features is not None:
            check_paths(data, ["test"])
            fields = len(self.features.fields)
            fields = fields if data.hashing is None else data.hashing.fields_of(fields)
            return fields, len(self.features.dense)
        if not has_split(data, "train"):
            raise ConfigError("data.train is missing: it must name at least one file")
        needy = self.config.train.needs_validation
        if needy and not has_split(data, "valid"):
            key = "data.synth.valid_examples" if data.format == "synth" else "data.valid"
            raise ConfigError(f"train.{needy} needs validation data: set {key}")
        check_paths(data, ["train", "valid", "test"])
        train = self.loader("train")
        self.features = getattr(train, "features", None)
        others: tuple[Split, ...] = ("valid", "test")
        for split in others:
            self.loader(split)
        return train.fields, train.dense

    def loader(self, split: Split) -> Any:
        """The batches of a split; none if the config has no data for it."""
        if split not in self._loaders:
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
            # Too small to be dealt out: rank 0 has it all.
            whole = open_data(self.config.data, split, **options)
            return whole if self._shard[0] == 0 else []

    # ---- training

    @property
    def place(self) -> str:
        """Where it trains, in words."""
        import torch

        if self.table.hbm is None:
            unused = "" if self.config.tiers.hbm is None else "; tiers.hbm has no effect without a GPU"
            return f"the CPU, {plural(torch.get_num_threads(), 'thread')} of torch{unused}"
        device = self.table.hbm.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "an interpreted GPU"
        return f"{name}, {format_size(self.table.hbm.budget)} of it for rows"

    def fit(self, *, resume: bool = False, callbacks: Sequence[Callback] = ()) -> Result:
        """Trains, saves and tests as the config says; see `tc.Trainer.fit`. One process at a time in a folder."""
        together, run_dir = CollectiveRunner.of([self.table]), Path(self.config.train.run_dir)
        with contextlib.ExitStack() as held:
            together.broadcast("took the run's folder", lambda: held.enter_context(atomic_file.lock_dir(run_dir)))
            return self._fit(resume, callbacks)

    def _fit(self, resume: bool, callbacks: Sequence[Callback]) -> Result:
        from thermocline.training.trainer import Trainer

        config, run_dir = self.config, Path(self.config.train.run_dir)
        check_folder(config, resume=resume)
        papers = _Papers(config, self.features)
        listening = list(callbacks)
        if self._shard[0] == 0:
            if not has_run(run_dir):  # a new run's first: no checkpoint is ever without them
                papers.write()
            listening = [papers, *callbacks]
        trainer = Trainer(
            self.model, self.optimizers, run_dir=run_dir, config=config.train, callbacks=listening,
            dense_sync=config.dist.dense_sync,
        )  # fmt: skip
        again = resume or has_begun(run_dir)  # nothing was saved: it begins anew, from what the tables held
        return trainer.fit(self.loader("train"), self.loader("valid"), self.loader("test"), resume=again)

    # ---- what was trained

    @classmethod
    def load(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        checkpoint: int | str | None = None,
        config: Config | None = None,
        labelled: bool = True,
    ) -> Self:
        """A trained run, read only: its best checkpoint, or else its last; or the one of a step or tag.

        config   instead of the run's own; its data and tiers may be others
        """
        if config is None:
            config = config_of(run_dir)
        if not has_run(run_dir) and not has_begun(run_dir):
            raise NotFoundError(f"{run_dir} has no checkpoints: nothing was trained there")
        train = dataclasses.replace(config.train, run_dir=os.fspath(run_dir))
        run = cls(dataclasses.replace(config, train=train), read_only=True, labelled=labelled)
        try:
            run.step = run.restore(checkpoint)
        except BaseException:
            run.close()
            raise
        return run

    def restore(self, checkpoint: int | str | None = None) -> int:
        """Puts a checkpoint into model and table, changing nothing on disk; returns its step."""
        from thermocline.checkpoint.manager import Checkpoints

        for attempt in range(_READ_TRIES):
            checkpoints = Checkpoints(
                self.config.train.run_dir, [self.table], self.model, self.optimizers, read_only=True
            )
            try:
                which = checkpoint
                if which is None and any(saved.tag == "best" for saved in checkpoints.saved()):
                    which = "best"
                found = checkpoints.restore(None if which == "last" else which)
            except (NotFoundError, FileNotFoundError):
                # A training process may have saved, and released what we chose, before we read it: look again.
                checkpoints.close()
                if attempt == _READ_TRIES - 1:
                    raise
                self.table.checkpoint_store = None
                continue
            if found is None:
                raise NotFoundError(
                    f"{self.config.train.run_dir} has nothing saved yet: its first checkpoint is to come"
                )
            return found.step
        raise AssertionError

    def evaluate(self, batches: Iterable[Batch]) -> Row:
        """Exact AUC, logloss, normalised entropy and calibration."""
        from thermocline.training.trainer import Trainer

        return Trainer(self.model).evaluate(batches)

    def scores(self, batches: Iterable[Batch]) -> Iterator[Floats]:
        """The probability of each example, batch by batch, in order."""
        import torch

        self.model.eval()
        with torch.no_grad(), prefetch(batches, self.table, depth=self.config.train.depth, training=False) as ready:
            for batch in ready:
                yield torch.sigmoid(self.model(batch)).cpu().numpy()

    def close(self, *, failed: bool = False) -> None:
        """Closes the store, and leaves the ranks; `failed`: without waiting for them."""
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


class _Papers(Callback):
    """Writes config.toml and features.json once all is restored: a resume that fails leaves what the run needs."""

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
