"""Restores a checkpoint for reading, in one process or over ranks, while another process may train the run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thermocline.distributed.collective_errors import CollectiveRunner
from thermocline.distributed.rank_agreement import require_equal
from thermocline.errors import NotFoundError, RankError

if TYPE_CHECKING:
    import torch

    from thermocline.checkpoint.manager import Checkpoint, Checkpoints
    from thermocline.embedding.table import Table

_ATTEMPTS = 10


def restore_for_reading(
    run_dir: Path,
    table: Table,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    checkpoint: int | str | None,
) -> Checkpoint:
    """Load a checkpoint into model and table without changes on disk, and return it. Collective over ranks.

    checkpoint   step or tag; "last"; None: the best if there is one, else the last. Rank 0 selects it for all ranks
    """
    runner = CollectiveRunner.of([table])
    comm = None if table.groups is None else table.groups.train
    require_equal(comm, {"--checkpoint": checkpoint}, "select the same checkpoint on all ranks")
    for attempt in range(1, _ATTEMPTS + 1):
        error: Exception | None = None
        restored: Checkpoint | None = None
        try:
            restored = _restore(runner, run_dir, table, model, optimizers, checkpoint)
        except Exception as failure:
            error = failure
        outcomes = runner.gather("restoring a checkpoint", functools.partial(_outcome, error))
        if set(outcomes) == {"restored"}:
            if restored is not None:
                return restored
            raise NotFoundError(f"{run_dir} has nothing saved yet: wait for its first checkpoint")
        # A training process may have replaced the checkpoint before it was read: all ranks try again.
        if "failed" in outcomes or "missing" not in outcomes or attempt == _ATTEMPTS:
            raise error or RankError("another rank could not restore the checkpoint: see its error")
        table.checkpoint_store = None
    raise AssertionError


def _restore(
    runner: CollectiveRunner,
    run_dir: Path,
    table: Table,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    checkpoint: int | str | None,
) -> Checkpoint | None:
    """Restore once; return the checkpoint, or None if the run has not saved yet."""
    from thermocline.checkpoint.manager import Checkpoints

    checkpoints = Checkpoints(run_dir, [table], model, optimizers, read_only=True)
    try:
        if checkpoint is None:
            checkpoint = runner.broadcast("selecting a checkpoint", lambda: _best_or_last(checkpoints))
        restored = checkpoints.restore(None if checkpoint == "last" else checkpoint)
    except BaseException:
        checkpoints.close()
        raise
    return restored


def _best_or_last(checkpoints: Checkpoints) -> str:
    return "best" if any(saved.tag == "best" for saved in checkpoints.saved()) else "last"


def _outcome(error: Exception | None) -> str:
    """Classify the end of a restore on one rank: "relayed" means that another rank failed."""
    if error is None:
        return "restored"
    if isinstance(error, (NotFoundError, FileNotFoundError)):
        return "missing"
    return "relayed" if isinstance(error, RankError) else "failed"


def watermark_of(checkpoint: Checkpoint) -> int | None:
    """Return the largest event time that the rows of a checkpoint contain; None: its data has no event times."""
    extras = checkpoint.extras or (checkpoint.extra,)  # of every rank
    times = [extra["trainer"].get("event_time") for extra in extras if isinstance(extra, dict) and "trainer" in extra]
    return max((time for time in times if time is not None), default=None)
