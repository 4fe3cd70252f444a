"""Publishes the rows of a run for serving while it trains: [publish] in a config."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from thermocline.config.publish import SERVED, Publish
from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.embedding.expiry import Expiry
from thermocline.embedding.table import Table
from thermocline.errors import NotFoundError, RankError, ThermoclineError
from thermocline.serving import Publication, ServedRows, Version
from thermocline.serving.version import read_current, read_version, versions
from thermocline.training.callbacks import Callback
from thermocline.training.publish import publish_table, with_coefficients
from thermocline.training.rank_coordinator import PUBLISH
from thermocline.utils.text_format import parse_duration

if TYPE_CHECKING:
    import torch

    from thermocline.training.trainer import Trainer

_KEPT_BASES = 2
_DOING = "publishing a version"


class Publisher(Callback):
    """Publishes a version between steps when one is due, and at the end of a finished run.

    Over ranks every rank has one: rank 0's clock decides, and rank 0 writes the rows of all (`rank_rows.py`). While the
    ranks wait for files nothing is published, as they cannot agree on it: the next step does.

    A new run publishes a base first, a resumed one a delta. A base is also published where a delta is not possible:
    the folder has no version, was rolled back, or has a later step or another precision.
    """

    def __init__(
        self,
        settings: Publish,
        table: Table,
        files: Callable[[], Mapping[str, bytes]] = dict,
        expiry: Expiry | None = None,
    ) -> None:
        """
        files   returns the further files of a version, such as `scoring_files(run)`
        expiry  has the coefficients of the score

        Raises ValueError if the served rows depend on statistics that the table does not keep.
        """
        assert settings.folder is not None
        rule = {name: value for name in SERVED if (value := getattr(settings, name)) is not None}
        self._served = with_coefficients(ServedRows(**rule), expiry) if rule else None
        if self._served is not None:
            self._served.check(table.spec.statistics.names)
        self._files = files
        self._settings = settings
        self._table = table
        self._folder = Path(settings.folder)
        self._seconds = None if settings.every is None else parse_duration(settings.every)
        self._is_new = True
        self._published_step = 0
        self._published_at = 0.0
        self.versions: list[Version] = []
        """Versions that this process has published."""

    def on_start(self, trainer: Trainer) -> None:
        self._is_new = trainer.progress.step == 0
        self._published_at = time.monotonic()
        trainer.ranks.publish_due = self._is_due

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        every = self._settings.every_steps
        by_step = every is not None and trainer.progress.step % every == 0
        if by_step or trainer.ranks.requested(PUBLISH, self._is_due()):
            self._publish(trainer, trainer.progress.step)

    def on_wait(self, trainer: Trainer) -> None:
        if trainer.ranks.world == 1 and self._is_due() and trainer.progress.step > self._published_step:
            self._publish(trainer, trainer.progress.step)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.ranks.world > 1 and sys.exc_info()[0] is not None:
            return  # other ranks may be lost
        if trainer.completed_step is not None and trainer.completed_step != self._published_step:
            self._publish(trainer, trainer.completed_step)

    def _is_due(self) -> bool:
        return self._seconds is not None and time.monotonic() - self._published_at >= self._seconds

    def _publish(self, trainer: Trainer, step: int) -> None:
        runner = CollectiveRunner.of([self._table])
        event_time = trainer.ranks.latest(trainer.progress.event_time)
        try:
            with trainer.ranks.merged():
                files = runner.run_all(_DOING, self._files)
            delta = runner.broadcast(_DOING, lambda: not self._is_new and self._takes_delta(step))
            with warnings.catch_warnings():
                if len(self.versions) > 1:  # once is enough, and the next versions have the same cause
                    warnings.filterwarnings("ignore", ".*all rows are compared with version", RuntimeWarning)
                version = publish_table(
                    self._table, self._folder, step=step, delta=delta, precision=self._settings.precision,
                    served=self._served, event_time=event_time, files=files,
                )  # fmt: skip
            if not delta:
                runner.broadcast(_DOING, self._retire)
        except (OSError, ValueError, ThermoclineError) as error:
            if isinstance(error, RankError) and not error.all_connected:
                raise  # a rank is lost: the others can neither continue nor save
            self._published_at = time.monotonic()
            self._fail(trainer, f"publish.folder is {str(self._folder)!r}: step {step} cannot be published: {error}")
        else:
            self._is_new = False
            self._published_step, self._published_at = step, time.monotonic()
            self.versions.append(version)
        finally:
            trainer.ranks.done(PUBLISH)

    def _retire(self) -> None:
        with Publication(self._folder, precision=self._settings.precision) as publication:
            publication.retire(_KEPT_BASES)

    def _takes_delta(self, step: int) -> bool:
        """Whether the current version can be followed by a delta, and is not the last one before a base."""
        try:
            current = read_current(self._folder)
        except NotFoundError:
            return False
        folders = versions(self._folder)
        version = read_version(folders[current.number])
        last_base = max(number for number, folder in folders.items() if folder.name.endswith("base"))
        return (
            not current.rolled_back
            and current.number - last_base < self._settings.base_every
            and version.step <= step
            and all(table.precision == self._settings.precision for table in version.tables)
        )

    def _fail(self, trainer: Trainer, text: str) -> None:
        if self._settings.on_error == "warn":
            if trainer.ranks.is_rank0:
                warnings.warn(f"{text}. Training continues", RuntimeWarning, stacklevel=2)
            return
        trainer.save()
        raise ThermoclineError(
            f"{text}. Training stopped, saved at step {trainer.progress.step}: remove the cause and continue with "
            '--resume, or set publish.on_error = "warn"'
        )
