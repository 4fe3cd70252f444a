"""Quantized rows: AUC and bytes against the bits of a weight, fixed and stochastic rounding, learned scales."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from experiments.experiment import (
    Cell,
    Claim,
    Experiment,
    Figure,
    Json,
    Section,
    Series,
    Setup,
    Step,
    StepContext,
    Table,
    config_settings,
)
from thermocline.config.data import Data, Synth
from thermocline.config.model import ModelConfig
from thermocline.config.schema import Config, Tiers, Train
from thermocline.embedding.precision import Kind, Precision, Rounding

KEYS, FIELDS, ZIPF, DIM, HIDDEN = 200_000, 16, 1.05, 8, (64, 32)
BATCH, SMALL = 4096, 1024
"""Every update of a row is rounded: batches of SMALL round hot rows four times as often as batches of BATCH."""
DENSE_LR = 1e-3
"""Learning rate for batches of SMALL; it grows in proportion to the batch."""
EXAMPLES, TEST = 1_000_000, 200_000
RANGE = 1.0
"""Range of a table's weights; nearly all weights of these trainings are inside."""
WIDE = 4 * RANGE
"""A range that is too wide, as chosen without knowledge of the weights."""
SCALE_LR = 0.01
LOSSLESS = 0.0005
"""Largest loss of AUC that counts as lossless."""
SEEDS = 5
"""Data sets and trainings per mean: two trainings with the same precision differ by about LOSSLESS."""
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic")
KINDS: dict[int, Kind] = {2: "int2", 3: "int3", 4: "int4", 5: "int5", 6: "int6", 8: "int8", 16: "int16"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One precision of the rows, and the training that measures it."""

    name: str
    line: str
    """Line of the figure that the case is a point of."""
    precision: Precision
    dim: int = DIM
    batch: int = BATCH
    seed: int = 0
    """Added to the run's seed."""


FP32, INT16, ROW8, LEARNED8 = (
    "fp32",
    "int16, stochastic, range of the table",
    "int8, stochastic, range of the row",
    "int8, scale learned from a good range",
)


def thorough(setup: Setup) -> bool:
    """Whether the run trains every point of the figure."""
    return setup.effort >= 0.5


def bits(setup: Setup, rounding: Rounding) -> list[int]:
    """Return the bits of one line of the figure."""
    if thorough(setup):
        return list(KINDS)
    return [4, 8, 16] if rounding == "stochastic" else [4, 8]


def cases(setup: Setup) -> list[Case]:
    """Return every case once, with the run's seed."""
    made = [Case(name=FP32, line="fp32", precision=Precision())]
    if thorough(setup):
        made += [Case(name=kind, line="half", precision=Precision.of(kind)) for kind in ("fp16", "bf16")]
    for limit, owner in ((RANGE, "table"), (None, "row")):
        for rounding in ROUNDINGS:
            line = f"{rounding}, range of the {owner}"
            for b in bits(setup, rounding):
                precision = Precision(kind=KINDS[b], rounding=rounding, range=limit)
                made.append(Case(name=f"int{b}, {line}", line=line, precision=precision))
    for b in (4, 8) if thorough(setup) else (8,):
        for limit, start in ((RANGE, "a good"), (WIDE, "a wide")):
            precision = Precision(kind=KINDS[b], range=limit, scale_lr=SCALE_LR)
            made.append(
                Case(name=f"int{b}, scale learned from {start} range", line="learned scale", precision=precision)
            )
        made.append(Case(name=f"int{b}, wide range", line="wide", precision=Precision(kind=KINDS[b], range=WIDE)))
    for b in (8, 16) if thorough(setup) else (8,):
        dim = DIM * 32 // b
        made.append(
            Case(name=f"int{b}, dim {dim}", line="more dims", precision=Precision(kind=KINDS[b], range=RANGE), dim=dim)
        )
    if thorough(setup):
        small = [case for case in made if case.name in (FP32, LEARNED8)]
        made += [
            dataclasses.replace(case, name=with_small_batches(case.name), line="small", batch=SMALL) for case in small
        ]
    return made


def with_small_batches(name: str) -> str:
    """Return the name of a case with small batches."""
    return f"{name}, batches of {SMALL:,}"


def seeds(setup: Setup) -> range:
    """Return the seed offsets of the cases that are compared over several seeds."""
    return range(SEEDS if thorough(setup) else 1)


def with_seed(name: str, seed: int) -> str:
    """Return the name of a case with another seed."""
    return f"{name}, seed + {seed}" if seed else name


def compared(setup: Setup) -> list[str]:
    """Return the names of the cases that are trained with all seeds."""
    return [FP32, INT16, ROW8, LEARNED8] + (
        [with_small_batches(FP32), with_small_batches(LEARNED8)] if thorough(setup) else []
    )


def trainings(setup: Setup) -> list[Case]:
    """Return all trainings: every case, the compared ones with all seeds."""
    made, names = cases(setup), compared(setup)
    for seed in seeds(setup)[1:]:
        made += [
            dataclasses.replace(case, name=with_seed(case.name, seed), seed=seed)
            for case in cases(setup)
            if case.name in names
        ]
    return made


def examples(setup: Setup) -> int:
    """Return the number of training examples."""
    return setup.count(EXAMPLES, 4 * SMALL)


def batch_size(setup: Setup, case: Case | None = None) -> int:
    """Return the examples per batch; a short run uses small batches."""
    return SMALL if not thorough(setup) else BATCH if case is None else case.batch


def config(setup: Setup, case: Case) -> Config:
    """Configure the training of one case, as for `thermocline train`."""
    keys, count = setup.count(KEYS, 100 * FIELDS), examples(setup)
    seed, size = setup.seed + case.seed, batch_size(setup, case)
    synth = Synth(
        keys=keys, fields=FIELDS, zipf=ZIPF, seed=seed,
        examples=count, valid_examples=0, test_examples=min(TEST, count),
    )  # fmt: skip
    return Config(
        data=Data(format="synth", synth=synth),
        model=ModelConfig(
            name="dnn", dim=case.dim, hidden=HIDDEN, dropout=0.0, embedding_l2=0.0, initial=0.01, batch_norm=False
        ),
        precision=case.precision,
        tiers=Tiers(device=setup.device, mem=(4 * case.dim + 128) * keys + (64 << 20)),
        train=Train(
            batch_size=size, optimizer="rowwise_adagrad", lr=0.05, dense_optimizer="adam",
            dense_lr=DENSE_LR * size / SMALL, seed=seed,
        ),
    )  # fmt: skip


def steps(setup: Setup) -> list[Step]:
    """Return one training per case and seed."""
    made = []
    for case in trainings(setup):
        case_config = config(setup, case)

        def run(context: StepContext, case_config: Config = case_config) -> Json | None:
            from experiments.training import train

            return train(case_config, context)

        seconds = 2 + examples(setup) / 200_000
        made.append(Step(name=case.name, settings=config_settings(case_config), expected_seconds=seconds, run=run))
    return made


# ---- section of the report


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    """Show AUC and bytes of every case, and the differences from fp32 by seed."""
    number = len(seeds(setup))
    return Section(
        text=[
            f"Generated ads (tc.SyntheticAds): {FIELDS} fields, Zipf exponent {ZIPF}, "
            f"{setup.count(KEYS, 100 * FIELDS):,} keys. One pass over {examples(setup):,} examples in batches of "
            f"{batch_size(setup):,}; AUC is measured on other examples. Rows have {DIM} weights and one float32 of "
            "row-wise Adagrad. The weights have b bits in every tier. They are decoded at look-up, updated in fp32 and "
            "rounded: to the nearest value (fixed rounding of Zhao 2026) or stochastically, so that the mean is exact.",
            f"The range belongs to the table, [-{RANGE:g}, {RANGE:g}] in 2^b - 1 intervals, or to each row, given by "
            "its largest weight, for 4 more bytes per row. A learned scale starts from a range and is trained with "
            f"the rows. Other cases use the bytes of fp32 for more dimensions, or a range that is too wide ({WIDE:g}).",
            "Every update is rounded, so the noise grows with the number of updates of a row. One scale for all rows "
            "is too coarse for the small weights of most rows or clamps the large weights of hot rows. A table's scale "
            "is therefore lossless only up to some hundreds of updates, for which the batch size was chosen; a scale "
            "per row is lossless beyond that. Trainings also differ by chance: the lossless claims are means over "
            f"{number} seed{'s' if number > 1 else ''}.",
        ],
        parts=[
            _figure(setup, results),
            _lossless_figure(setup, results),
            _wide_figure(results),
            _table(setup, results),
            _seeds_table(setup, results),
        ],
        claims=_claims(setup, results),
    )


def _auc(results: Mapping[str, Json], name: str) -> float:
    return float(results[name]["auc"])


def _table(setup: Setup, results: Mapping[str, Json]) -> Table:
    base = _auc(results, FP32)
    rows = []
    for case in cases(setup):
        result = results[case.name]
        auc = _auc(results, case.name)
        size = result["rows"] * result["row_bytes"]
        rows.append((case.name, case.precision.bits, case.dim, result["row_bytes"], size, auc, auc - base))
    return Table(
        name="table",
        title="Quantized rows: bytes and AUC",
        columns=("rows", "bits", "dim", "bytes per row", "bytes of rows", "test AUC", "difference from fp32"),
        rows=rows,
        note="Bytes are those of stored rows, including the optimizer's state.",
    )


def _figure(setup: Setup, results: Mapping[str, Json]) -> Figure:
    lines = [f"{rounding}, range of the {owner}" for owner in ("table", "row") for rounding in ROUNDINGS]
    series = []
    for line in [*lines, "learned scale"]:
        points = [case for case in cases(setup) if case.line == line and case.precision.range != WIDE]
        x = [case.precision.bits for case in points]
        series.append(Series(name=line, x=x, y=[_auc(results, case.name) for case in points]))
    return Figure(
        name="auc",
        title="AUC against the bits of a weight",
        x_label="bits",
        y_label="test AUC",
        x_scale="log2",
        series=series,
        hlines={"fp32": _auc(results, FP32)},
        y_from=0.7,
        note="Points below 0.7, where training fails, are not drawn: they are in the table.",
    )


def _lossless_figure(setup: Setup, results: Mapping[str, Json]) -> Figure:
    names = [name for name in compared(setup) if name not in (FP32, with_small_batches(FP32))]
    differences = [_differences(setup, results, name) for name in names]
    numbers = [str(n + 1) for n in range(len(names))]
    return Figure(
        name="lossless",
        title="AUC minus AUC of fp32: mean over seeds",
        x_label="rows",
        y_label="difference of AUC",
        form="bars",
        series=[Series(name="mean", x=numbers, y=[statistics.fmean(values) for values in differences])],
        hlines={"bound of the claims": -LOSSLESS},
        note="; ".join(f"{n}: {name}" for n, name in zip(numbers, names, strict=True)) + ".",
    )


def _wide_figure(results: Mapping[str, Json]) -> Figure:
    names = {"fixed": "int8, wide range", "learned": "int8, scale learned from a wide range"}
    return Figure(
        name="wide",
        title="A range that is too wide, 8 bits: AUC minus AUC of fp32",
        x_label="scale: fixed, or learned from that range",
        y_label="difference of AUC",
        form="bars",
        series=[Series(name="int8", x=list(names), y=[_auc(results, n) - _auc(results, FP32) for n in names.values()])],
    )


def _differences(setup: Setup, results: Mapping[str, Json], name: str) -> list[float]:
    """Return AUC minus the AUC of fp32 with the same batch size, per seed."""
    base = with_small_batches(FP32) if name == with_small_batches(LEARNED8) else FP32
    return [_auc(results, with_seed(name, seed)) - _auc(results, with_seed(base, seed)) for seed in seeds(setup)]


def _seeds_table(setup: Setup, results: Mapping[str, Json]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name in compared(setup):
        if name not in (FP32, with_small_batches(FP32)):
            differences = _differences(setup, results, name)
            rows.append((name, statistics.fmean(differences), *differences))
    return Table(
        name="seeds",
        title="AUC minus AUC of fp32, by seed",
        columns=("rows", "mean", *(f"seed {setup.seed + seed}" for seed in seeds(setup))),
        rows=rows,
        note="Each seed has its own data set and training. fp32 is trained with the same batch size.",
    )


def _claims(setup: Setup, results: Mapping[str, Json]) -> list[Claim]:
    claims = []
    for owner in ("table", "row"):
        pairs = [
            [_auc(results, f"int{b}, {rounding}, range of the {owner}") for rounding in ROUNDINGS]
            for b in bits(setup, "nearest")
            if b <= 4
        ]
        claims.append(
            Claim(
                text=f"stochastic rounding beats fixed rounding at 4 bits and below, range of the {owner}",
                holds=all(fixed < stochastic for fixed, stochastic in pairs),
                detail=", ".join(f"{stochastic:.4f} over {fixed:.4f}" for fixed, stochastic in pairs),
                part="auc",
                paper="plotted, no numbers printed",
            )
        )
    claims.append(_lossless("16 bits", _differences(setup, results, INT16)))
    claims.append(_lossless("8 bits with a scale per row", _differences(setup, results, ROW8)))
    claims.append(_lossless("8 bits with a learned scale", _differences(setup, results, LEARNED8)))
    if thorough(setup):
        # Four times as many roundings: measured, not asserted.
        differences = _differences(setup, results, with_small_batches(LEARNED8))
        claims.append(_lossless(f"8 bits with a learned scale, batches of {SMALL:,}", differences, asserted=False))
    wide, learned = (_auc(results, f"int8, {name}") for name in ("wide range", "scale learned from a wide range"))
    claims.append(
        Claim(
            text="a learned scale corrects a range that is too wide",
            holds=wide < learned,
            detail=f"{learned:.4f} over {wide:.4f}",
            part="wide",
        )
    )
    return claims


def _lossless(name: str, differences: Sequence[float], asserted: bool = True) -> Claim:
    mean = statistics.fmean(differences)
    by_seed = ", ".join(f"{difference:+.4f}" for difference in differences)
    return Claim(
        text=f"{name}: lossless within {LOSSLESS} of AUC",
        holds=mean > -LOSSLESS,
        detail=f"{mean:+.5f} against fp32 (by seed: {by_seed})",
        part="lossless",
        asserted=asserted,
        ours=f"{mean:+.5f}",
    )


EXPERIMENT = Experiment(
    title="Quantized rows: AUC and bytes, fixed and stochastic rounding", steps=steps, section=section
)
