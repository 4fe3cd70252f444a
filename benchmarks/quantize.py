"""AUC and bytes of rows kept in b bits: fixed against stochastic rounding, a learned step, the same bytes as more dims.

    python benchmarks/quantize.py --quick
    python benchmarks/quantize.py --seeds 3 --out rows.json

`measure` gives plain dicts, one per case and seed. The data is `tc.SyntheticAds`: a planted model, so that a larger dim
and finer weights pay. Nothing here measures time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

import thermocline as tc
from thermocline.data.schema import Synth
from thermocline.models import row_dim
from thermocline.run import row_optimizer
from thermocline.tables.precision import Kind

console = Console()
Row = dict[str, Any]
BITS = (2, 3, 4, 5, 6, 8, 16)
RANGE = 1.0
"""Half the width of a table's range: what holds nearly all weights of these trainings."""
LEARN = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How rows are kept."""

    name: str
    group: str
    dim: int
    precision: tc.Precision


def cases(dim: int, bits: Sequence[int] = BITS) -> list[Case]:
    """fp32, halves, b bits either way of rounding and scaling, the learned step, and the bytes of fp32 as more dims."""
    made = [Case(name="fp32", group="fp32", dim=dim, precision=tc.Precision())]
    for kind in ("fp16", "bf16"):
        made.append(Case(name=kind, group="half", dim=dim, precision=tc.Precision.of(kind)))
    for b, rounding in itertools.product(bits, ("nearest", "stochastic")):
        for limit, of in ((RANGE, "table"), (None, "row")):
            precision = tc.Precision(kind=_kind(b), rounding=rounding, range=limit)  # type: ignore[arg-type]
            made.append(Case(name=f"int{b} {rounding}, {of}", group=f"{rounding}, {of}", dim=dim, precision=precision))
    for b, times in itertools.product((4, 8), (1, 4)):  # also from a range that is far too wide
        precision = tc.Precision(kind=_kind(b), range=times * RANGE, learn=LEARN)
        name = f"int{b} learned from {times * RANGE:g}"
        made.append(Case(name=name, group="learned", dim=dim, precision=precision))
    made.append(Case(name="int8, 4", group="wide", dim=dim, precision=tc.Precision(kind="int8", range=4 * RANGE)))
    for b in (8, 16):
        precision = tc.Precision(kind=_kind(b), range=RANGE)
        more = dim * 32 // b
        made.append(Case(name=f"int{b}, dim {more}", group="same bytes", dim=more, precision=precision))
    return made


def _kind(bits: int) -> Kind:
    return f"int{bits}"  # type: ignore[return-value]


def config_of(
    case: Case, *, seed: int, keys: int, fields: int, examples: int, test_examples: int, hidden: tuple[int, ...]
) -> tc.Config:
    """The run of one case: `thermocline train` would do the same with it."""
    synth = Synth(
        keys=keys, fields=fields, zipf=1.05, seed=seed,
        examples=examples, valid_examples=0, test_examples=test_examples,
    )  # fmt: skip
    return tc.Config(
        data=tc.Data(format="synth", synth=synth),
        model=tc.ModelConfig(
            name="dnn", dim=case.dim, hidden=hidden, dropout=0.0, embedding_l2=0.0, initial=0.01, batch_norm=False
        ),
        precision=case.precision,
        tiers=tc.Tiers(device="cpu", mem=keys * (4 * case.dim + 128) + (64 << 20)),
        train=tc.Train(
            batch_size=1024, optimizer="rowwise_adagrad", lr=0.05, dense_optimizer="adam", dense_lr=1e-3, seed=seed,
            checkpoint_minutes=None, tensorboard=False, display=False, torch_threads=1,
        ),
    )  # fmt: skip


def measure(
    chosen: Iterable[Case],
    seeds: Iterable[int] = (0,),
    *,
    keys: int = 200_000,
    fields: int = 16,
    examples: int = 1_000_000,
    test_examples: int = 200_000,
    hidden: tuple[int, ...] = (64, 32),
    tell: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """One training and test per case and seed."""
    rows = []
    for seed, case in itertools.product(list(seeds), list(chosen)):
        config = config_of(
            case, seed=seed, keys=keys, fields=fields, examples=examples, test_examples=test_examples, hidden=hidden
        )
        with tempfile.TemporaryDirectory() as folder:
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=f"{folder}/run"))
            with tc.Run(config) as run:
                test = run.fit().test
                trained = sum(len(found) for found, _ in run.table.rows())
                learned = run.table.tier.learned
        assert test is not None
        precision, dim, optimizer = case.precision, row_dim(config.model), row_optimizer(config)
        row_bytes = precision.row_bytes(dim, optimizer)
        rows.append(
            {
                "case": case.name, "group": case.group, "seed": seed, **dataclasses.asdict(precision), "dim": case.dim,
                "bits": precision.bits, "row_bytes": row_bytes, "rows": trained, "bytes": trained * row_bytes,
                "auc": test["auc"], "logloss": test["logloss"], "examples": examples,
                "learned_range": None if learned is None else learned.step * (2**precision.bits - 1) / 2,
            }
        )  # fmt: skip
        tell(rows[-1])
    return rows


def print_rows(rows: Sequence[Row]) -> None:
    """Means over the seeds, against fp32 of the same seeds."""
    grid = Grid(title="test AUC of rows in b bits")
    for column in ("rows", "bytes a row", "AUC", "against fp32", "each"):
        grid.add_column(column)
    base = {row["seed"]: row["auc"] for row in rows if row["case"] == "fp32"}
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        auc = statistics.mean(row["auc"] for row in own)
        known = [row["auc"] - base[row["seed"]] for row in own if row["seed"] in base]
        behind = f"{statistics.mean(known):+.4f}" if known else ""
        each = " ".join(f"{row['auc']:.4f}" for row in own)
        grid.add_row(case, str(own[0]["row_bytes"]), f"{auc:.4f}", behind, each)
    console.print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases, keys and examples: some minutes")
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", help="cases whose name contains this, and fp32")
    parser.add_argument("--out", type=Path, help="write the rows here, as JSON")
    arguments = parser.parse_args()
    chosen = cases(arguments.dim, (2, 4, 8) if arguments.quick else BITS)
    if arguments.only:
        chosen = [case for case in chosen if case.name == "fp32" or arguments.only in case.name]
    sizes: dict[str, Any] = {"keys": 50_000, "examples": 200_000, "test_examples": 50_000} if arguments.quick else {}
    rows = measure(
        chosen,
        range(arguments.seeds),
        **sizes,
        tell=lambda row: console.print(f"{row['case']:28} seed {row['seed']}: AUC {row['auc']:.4f}"),
    )
    print_rows(rows)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
