"""26 tables of `tc.Tiers` against one table with 26 fields, for the same ids.

Claim    26 tables cost at most 1.2 times one table: processor time and wall time of a training step, and peak memory.
Method   Each side is a process of its own, which trains a number of steps when told to; the sides take turns, and the
         figure is the median over rounds of the ratio to the side "one table" of the same round. A step: rows pulled
         by `tc.prefetch`, pooled, joined to one tensor, backward, one update per unique key. The dense part is one
         product with a constant, so that the ratio is that of the embeddings. Ids are Zipf-distributed, one per field
         and example; the one table has keys field << 32 | id. All sides have the same budget in total, and all rows
         are loaded before training. Memory is the growth of the peak resident set since the imports. On a GPU, time is
         wall time, and memory that of the process and the peak of torch's allocator.
Sides    one table         tc.Table, tc.EmbeddingBag with 26 fields
         tiers             26 tables of tc.Tiers, a tc.EmbeddingBag each, joined by tc.EmbeddingBags
         tiers, cat        the same, joined by torch.cat
         nn bags           26 tables of tc.Tiers, a tc.nn.EmbeddingBag each, with ids and offsets of its own as in DLRM;
                           called together by tc.nn.EmbeddingBags, joined outputs, batches by batch_of
         nn bags, cat      the same without tc.prefetch, as in examples/port_dlrm.py, joined by torch.cat
         nn bags alone     the same modules without tc.prefetch, called one by one, joined by torch.cat
         separate          26 tc.Tables, a tc.EmbeddingBag each, as before tc.Tiers
         collection, one   EmbeddingBagCollection of one table with 26 features
         collection        EmbeddingBagCollection of 26 tables
Command  python benchmarks/many_tables.py --json FILE
         python benchmarks/many_tables.py --device cuda --json FILE
         python benchmarks/many_tables.py --quick                     seconds, few ids
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import Claim, console, environment, print_claims, spread, write_json

NN_SIDES = ["nn bags", "nn bags, cat", "nn bags alone"]
SIDES = ["one table", "tiers", "tiers, cat", *NN_SIDES, "separate", "collection, one", "collection"]
BASE = {
    **dict.fromkeys(["tiers", "tiers, cat", *NN_SIDES, "separate"], "one table"),
    "collection": "collection, one",
}
TARGET = 1.2
DISTINCT = 16
"""Batches that are generated, and trained in turn."""


def main() -> None:
    """Run all sides in turn, or one side of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=50_000, help="ids per table")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mem", default="512MB")
    parser.add_argument("--hbm", default="1GB", help="with --device cuda")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.rows, options.steps, options.rounds, options.mem = 256, 1000, 3, 3, "64MB"
    if options.side is not None:
        _run_side(options)
    else:
        _compare(options)


# ---- one side


def _batches(options: argparse.Namespace) -> list[np.ndarray[Any, Any]]:
    """Return the ids of each batch: int64[examples, tables]."""
    rng = np.random.default_rng(1)
    weights = 1 / np.arange(1, options.rows + 1) ** 1.05
    cumulative = np.cumsum(weights) / weights.sum()
    shape = options.batch, options.tables
    return [np.searchsorted(cumulative, rng.random(shape)).clip(0, options.rows - 1) for _ in range(DISTINCT)]


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _run_side(options: argparse.Namespace) -> None:
    """Train steps for every line of the standard input; print a line of JSON for each."""
    import torch

    import thermocline as tc
    import thermocline.torchrec

    _ = thermocline.torchrec, tc.prefetch, tc.EmbeddingBag  # imported before memory is measured
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).zero_grad()  # imports another 140 MB of torch
    torch.set_num_threads(1)
    ids = _batches(options)
    constant = torch.rand(options.batch, options.tables * options.dim, device=options.device)
    before = _peak()
    step = _make_step(options, ids, constant)
    for line in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(int(line)):
            step()
        if options.device == "cuda":
            torch.cuda.synchronize()
        used = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "memory": _peak() - before}
        if options.device == "cuda":
            used["gpu_memory"] = torch.cuda.max_memory_allocated()
        print(json.dumps(used), flush=True)


class _Work(NamedTuple):
    """Inputs of a side."""

    options: argparse.Namespace
    ids: list[np.ndarray[Any, Any]]
    constant: Any
    names: list[str]
    budgets: dict[str, Any]
    optimizer: Any


def _make_step(options: argparse.Namespace, ids: list[np.ndarray[Any, Any]], constant: Any) -> Callable[[], None]:
    import torch

    import thermocline as tc

    names = [f"f{i:02}" for i in range(options.tables)]
    budgets: dict[str, Any] = {"mem": options.mem, **({"hbm": options.hbm} if options.device == "cuda" else {})}
    optimizer = tc.Adagrad(lr=0.1)
    if options.side.startswith("collection"):
        return _collection_step(_Work(options, ids, constant, names, budgets, optimizer))
    if options.side in NN_SIDES:
        return _nn_step(_Work(options, ids, constant, names, budgets, optimizer))
    offsets = np.arange(options.batch * options.tables + 1)
    shift = (np.arange(options.tables) << 32) if options.side == "one table" else 0
    batches = [tc.Batch((batch | shift).reshape(-1), offsets, options.tables, names=names) for batch in ids]
    if options.side == "one table":
        table = tc.Table(options.dim, optimizer, **budgets)
        _fill(options, [table], shift)
        bags = [tc.EmbeddingBag(table, names)]
        source, apply = [table], table.step
    elif options.side.startswith("tiers"):
        tiers = tc.Tiers(**budgets)
        bags = [tc.EmbeddingBag(tiers.table(name, options.dim, optimizer), [name]) for name in names]
        _fill(options, list(tiers.tables.values()), shift)
        source, apply = [tiers], tiers.step  # type: ignore[list-item, assignment]
    else:
        from thermocline.utils.text_format import parse_size

        parts = {name: parse_size(size, name) // options.tables for name, size in budgets.items()}
        tables = [tc.Table(options.dim, optimizer, name=name, **parts) for name in names]
        _fill(options, tables, shift)
        bags = [tc.EmbeddingBag(table, [table.name]) for table in tables]
        source, apply = tables, functools.partial(_step_all, tables)  # type: ignore[assignment]
    ready: Iterator[Any] = tc.prefetch(itertools.cycle(batches), *source)
    together = tc.EmbeddingBags(bags) if options.side == "tiers" else None

    def step() -> None:
        batch = next(ready)
        if together is not None:
            joined = together(batch)
        else:
            vectors = [bag(batch).flatten(1) for bag in bags]
            joined = vectors[0] if len(vectors) == 1 else torch.cat(vectors, 1)
        (joined * constant).sum().backward()
        apply()

    return step


def _nn_step(work: _Work) -> Callable[[], None]:
    import torch

    import thermocline as tc

    options = work.options
    tiers = tc.Tiers(**work.budgets)
    bags = tc.nn.EmbeddingBags(
        tc.nn.EmbeddingBag(tiers.table(name, options.dim, work.optimizer), mode="sum") for name in work.names
    )
    _fill(options, list(tiers.tables.values()), 0)
    rows = tc.RowOptimizer(tiers)
    offsets = [torch.arange(options.batch)] * len(bags)
    data = itertools.cycle([list(torch.from_numpy(np.ascontiguousarray(batch.T))) for batch in work.ids])
    ready: Iterator[Any] = data
    if options.side == "nn bags":
        ready = iter(tc.prefetch((bags.batch_of(ids, offsets) for ids in data), tiers))

    def step() -> None:
        ids = next(ready)
        if options.side == "nn bags":
            joined = bags.joined(ids)
        elif options.side == "nn bags, cat":
            joined = torch.cat(bags(ids, offsets), 1)
        else:
            joined = torch.cat([bag(*pair) for bag, *pair in zip(bags, ids, offsets, strict=True)], 1)
        rows.zero_grad()
        (joined * work.constant).sum().backward()
        rows.step()

    return step


def _step_all(tables: list[Any]) -> None:
    for table in tables:
        table.step()


def _fill(options: argparse.Namespace, tables: list[Any], shift: Any) -> None:
    """Load a row for every id of every table; for the one table, of every field."""
    ids = np.arange(options.rows)
    rows = np.zeros((options.rows, options.dim), np.float32)
    for keys in ids + (np.zeros((1, 1), np.int64) if np.ndim(shift) == 0 else shift[:, None]):
        for table in tables:
            table.load_rows(keys, rows)


def _collection_step(work: _Work) -> Callable[[], None]:
    import torch

    from thermocline.torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, prefetch

    options = work.options
    one = options.side.endswith("one")
    shift = (np.arange(options.tables) << 32) if one else 0
    lengths = torch.ones(options.batch * options.tables, dtype=torch.int64)
    data = [
        KeyedJaggedTensor(work.names, torch.from_numpy((batch | shift).T.reshape(-1)), lengths=lengths)
        for batch in work.ids
    ]
    rows = options.rows
    configs = [EmbeddingBagConfig(rows * options.tables, options.dim, "all", feature_names=work.names)]
    if not one:
        configs = [EmbeddingBagConfig(rows, options.dim, name) for name in work.names]
    collection = EmbeddingBagCollection(configs, device=options.device, optimizer=work.optimizer, **work.budgets)
    _fill(options, list(collection.tables.values()), shift)
    fresh = (KeyedJaggedTensor(work.names, kjt.values(), lengths=lengths) for kjt in itertools.cycle(data))
    ready = prefetch(fresh, collection)

    def step() -> None:
        (collection(next(ready)).values() * work.constant).sum().backward()

    return step


# ---- all sides


def _compare(options: argparse.Namespace) -> None:
    arguments = [sys.executable, __file__, *sys.argv[1:]]
    sides = {}
    for name in SIDES:
        sides[name] = subprocess.Popen(
            [*arguments, "--side", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for turn in range(options.rounds + 2):
        for name, process in sides.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{options.steps}\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the side {name!r} has ended: see its error above")
            if turn >= 2:  # the first turns bring the rows into memory
                figures[name].append(json.loads(line))
    for process in sides.values():
        process.communicate()
    _report(options, figures)


def _report(options: argparse.Namespace, figures: dict[str, list[dict[str, float]]]) -> None:
    kinds = ["wall", "memory", "gpu_memory"] if options.device == "cuda" else ["cpu", "wall", "memory"]
    results: dict[str, Any] = {}
    for name, rounds in figures.items():
        milliseconds = {kind: spread([1e3 * r[kind] / options.steps for r in rounds]) for kind in ("cpu", "wall")}
        memory = {kind: rounds[-1][kind] / 1e6 for kind in kinds if "memory" in kind}
        results[name] = {"step_ms": milliseconds, "peak_mb": memory}
        time_text = ", ".join(f"{kind} {value['median']:.2f} ms" for kind, value in milliseconds.items())
        memory_text = ", ".join(f"{kind} {value:.0f} MB" for kind, value in memory.items())
        console.print(f"{name:16} {time_text}, {memory_text}")
    claims = []
    for name, base in BASE.items():
        for kind in kinds:
            ratios = [r[kind] / b[kind] for r, b in zip(figures[name], figures[base], strict=True)]
            ratio = statistics.median(ratios)
            results[name][f"{kind}_ratio"] = spread(ratios)
            if name != "separate":
                claims.append(Claim(f"{name}: {kind} against {base}", ratio, TARGET, at_most=True))
    print_claims("Many tables", claims)
    if options.json is not None:
        settings = {key: value for key, value in vars(options).items() if key not in ("json", "side", "quick")}
        record = {"environment": environment(["torch"]), "sizes": settings, "results": results}
        write_json(options.json, record, claims)


if __name__ == "__main__":
    main()
