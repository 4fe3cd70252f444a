"""Evaluation of a model, and the best step by validation AUC."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import torch

from thermocline.batch import Batch
from thermocline.config.train import TrainConfig
from thermocline.embedding.table import Table
from thermocline.pipeline.prefetch import prefetch
from thermocline.training.callbacks import Row
from thermocline.training.metrics import ExactMetrics
from thermocline.training.rank_coordinator import RankCoordinator
from thermocline.training.state import Progress
from thermocline.training.throughput import lookahead_figures


def evaluate(
    model: torch.nn.Module, tables: Sequence[Table], data: Iterable[Batch], ranks: RankCoordinator, *, depth: int
) -> tuple[Row, Row | None]:
    """Compute exact metrics over the data of all ranks. Rows, parameters, buffers and module modes are unchanged.

    All ranks evaluate the mean of their dense models (`DenseParameters.merged`). `depth` is the pipeline depth. Returns
    the metrics, and the figures of this rank's look-ahead (`lookahead_figures`); None: it has none.
    """
    metrics, start = ExactMetrics(), time.perf_counter()
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with ranks.merged(), torch.no_grad(), prefetch(data, *tables, depth=depth, training=False) as batches:
            for batch in batches:
                if batch.examples:
                    label = torch.as_tensor(batch.label, dtype=torch.float32)
                    metrics.update(model(batch).cpu(), label.cpu())
    finally:
        for module, training in modes.items():
            module.training = training
    figures = ranks.joined(metrics).compute()
    if not figures["examples"]:
        raise ValueError(
            "the evaluation data has no batches: a generator can be iterated only once; "
            "pass a list or a loader that can be iterated again"
        )
    ahead = batches.lookahead
    return figures, None if ahead is None else lookahead_figures(ahead, None, time.perf_counter() - start)


def record_validation(progress: Progress, config: TrainConfig, auc: float) -> bool:
    """Update the best AUC, the plateau multiplier and early stopping; return whether `auc` is the best so far."""
    defined = math.isfinite(auc)
    if config.needs_validation and not defined:
        setting = config.needs_validation
        raise ValueError(f"TrainConfig.{setting} needs an AUC: all labels of the validation data are equal")
    progress.validated = progress.step
    is_best = defined and (progress.best_auc is None or auc > progress.best_auc)
    if is_best:
        progress.best_auc, progress.best_step, progress.stale = auc, progress.step, 0
    else:
        progress.stale += 1
        progress.plateau *= config.plateau_factor
    progress.stopped = config.patience is not None and progress.stale >= config.patience
    return is_best
