"""Compiles the kernels of a table's first steps in worker processes, while data and model are opened.

Triton compiles a kernel when it is first launched, one after the other: ten seconds for an empty cache. Here the
functions of a step are called once with small arguments and the table's own tensors, in a mode in which nothing is
launched (`compiling_only`). Kernels that are not listed here, or differ in an argument's alignment, are compiled when
they are launched.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import triton

from thermocline.embedding.table_spec import TableSpec
from thermocline.kernels.codec import Codec
from thermocline.kernels.dirty_flags import set_flags
from thermocline.kernels.evict import NEW
from thermocline.kernels.find_resident import find_resident
from thermocline.kernels.gradient_index import index_gradients
from thermocline.kernels.insert import find_or_insert
from thermocline.kernels.launch import compiling_only
from thermocline.kernels.optimizer_rules import OptimizerStep, StoredStep
from thermocline.kernels.pool import pool_rows
from thermocline.kernels.rows import copy_in
from thermocline.kernels.segments import find_segments
from thermocline.kernels.update import update_rows
from thermocline.tiers.hbm import HbmTier
from thermocline.tiers.plan_graph import HEADER, copy_header, one_and_zero
from thermocline.utils.compile_workers import is_used
from thermocline.utils.cpu_affinity import cores

_IDS = 256


def compile_ahead(tier: HbmTier, codec: Codec, spec: TableSpec) -> threading.Thread | None:
    """Start to compile the kernels of a step; nothing to do without a GPU. Returns the thread that does."""
    if tier.device.type != "cuda" or not is_used():
        return None
    thread = threading.Thread(target=_compile, args=(tier, codec, spec), name="thermocline-compile", daemon=True)
    thread.start()
    return thread


def _compile(tier: HbmTier, codec: Codec, spec: TableSpec) -> None:
    with torch.cuda.device(tier.device), compiling_only(min(8, cores())):
        triton.runtime.driver.active.get_current_device()  # builds Triton's driver once, before several threads need it
        call_step(tier, codec, spec)


def call_step(tier: HbmTier, codec: Codec, spec: TableSpec) -> None:
    """Call the functions of a step on ids that stand for any: longest compilation first, pooling of both kinds.

    The last calls are those of recorded planning and of a recorded step, which follow the first step.
    """
    device, arena = tier.device, tier.arena
    slots = torch.zeros(_IDS, dtype=torch.int32, device=device)
    segments = find_segments(slots).known(_IDS // 2, 1, 2)
    grads = torch.zeros(_IDS, spec.dim, device=device)
    weights, state = codec.weights(arena), codec.state(arena)
    rule = OptimizerStep.of(spec.optimizer, 1, lr=spec.optimizer.lr, scale=1.0)
    rows = torch.zeros(_IDS, dtype=torch.int32, device=device)
    update_rows(weights, state, segments, grads, rows, None, rule, codec, tier.dirty)
    keys = torch.zeros(_IDS, dtype=torch.int64, device=device)
    options: dict[str, Any] = {"count_visits": True, "evict": False}
    plan = find_or_insert(tier.index, tier.residents, keys, used=0, now=1, completed=0, **options)
    count = plan.counts[NEW.value :]
    set_flags(tier.dirty, plan.new_slots, count, 0)
    staged = torch.empty(_IDS, arena.shape[1], pin_memory=device.type == "cuda")
    copy_in(arena, plan.new_slots, staged, count)
    pool_rows(weights, slots, None, None, codec=codec)
    offsets = torch.arange(_IDS + 1, device=device)
    pool_rows(weights, slots, offsets, None, codec=codec)
    index_gradients(_IDS, segments.order, offsets, None, False, device)
    header = torch.zeros(HEADER, dtype=torch.int64, device=device)
    used, now, completed, _ = torch.split(header, 1)
    copy_header(torch.zeros(HEADER, dtype=torch.int64, pin_memory=device.type == "cuda"), header, one_and_zero(device))
    find_resident(tier.index, tier.residents, keys, slots, plan.counts[NEW.value :], now=now)
    find_or_insert(tier.index, tier.residents, keys, used=used, now=now, completed=completed, **options)
    constants = torch.zeros(StoredStep.WORDS, dtype=torch.int32, device=device)
    stored = StoredStep(spec.optimizer.code, spec.optimizer.weight_decay, constants)
    update_rows(weights, state, segments, grads, rows, None, stored, codec, tier.dirty)
