"""Rows of few bits: AUC and bytes against b, fixed against stochastic rounding, a learned step, and the same bytes as
a larger dim."""

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
    Table,
    Work,
    settings_of,
)
from thermocline.config.data import Data, Synth
from thermocline.config.model import ModelConfig
from thermocline.config.schema import Config, Tiers, Train
from thermocline.embedding.precision import Kind, Precision, Rounding

KEYS, FIELDS, ZIPF, DIM, HIDDEN = 200_000, 16, 1.05, 8, (64, 32)
BATCH, SMALL = 4096, 1024
"""Every update of a row is rounded: the same examples in batches a quarter as large round hot rows four times as often.
"""
DENSE_LR = 1e-3
"""Of batches of SMALL; larger ones have as many times more."""
EXAMPLES, TEST = 1_000_000, 200_000
RANGE = 1.0
"""Of a table's weights: nearly all of these trainings' lie inside."""
WIDE = 4 * RANGE
"""As somebody would choose who does not know."""
LEARN = 0.01
LOSSLESS = 0.0005
"""AUC within which nothing is lost."""
SEEDS = 5
"""Data sets and trainings whose mean says whether something is: two of the same precision differ by as much."""
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic")
KINDS: dict[int, Kind] = {2: "int2", 3: "int3", 4: "int4", 5: "int5", 6: "int6", 8: "int8", 16: "int16"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How rows are kept."""

    name: str
    line: str
    """Of which line of the figure it is a point."""
    precision: Precision
    dim: int = DIM
    batch: int = BATCH
    seed: int = 0
    """Beside the run's."""


FP32, INT16, ROW8, LEARNED8 = (
    "fp32",
    "int16, stochastic, range of the table",
    "int8, stochastic, range of the row",
    "int8, learned from a good range",
)


def thorough(setup: Setup) -> bool:
    """Whether all is trained that the figure could have."""
    return setup.effort >= 0.5


def bits(setup: Setup, rounding: Rounding) -> list[int]:
    """Those of a line of the figure."""
    if thorough(setup):
        return list(KINDS)
    return [4, 8, 16] if rounding == "stochastic" else [4, 8]


def cases(setup: Setup) -> list[Case]:
    """Every way, once."""
    made = [Case(name=FP32, line="fp32", precision=Precision())]
    if thorough(setup):
        made += [Case(name=kind, line="half", precision=Precision.of(kind)) for kind in ("fp16", "bf16")]
    for limit, of in ((RANGE, "table"), (None, "row")):
        for b, rounding in ((b, way) for way in ROUNDINGS for b in bits(setup, way)):
            line = f"{rounding}, range of the {of}"
            made.append(
                Case(
                    name=f"int{b}, {line}",
                    line=line,
                    precision=Precision(kind=KINDS[b], rounding=rounding, range=limit),
                )
            )
    for b in (4, 8) if thorough(setup) else (8,):
        for limit, start in ((RANGE, "a good"), (WIDE, "a wide")):
            precision = Precision(kind=KINDS[b], range=limit, scale_lr=LEARN)
            made.append(Case(name=f"int{b}, learned from {start} range", line="learned", precision=precision))
        made.append(Case(name=f"int{b}, wide", line="wide", precision=Precision(kind=KINDS[b], range=WIDE)))
    for b in (8, 16) if thorough(setup) else (8,):
        dim = DIM * 32 // b
        made.append(
            Case(name=f"int{b}, dim {dim}", line="more dims", precision=Precision(kind=KINDS[b], range=RANGE), dim=dim)
        )
    if thorough(setup):
        small = [case for case in made if case.name in (FP32, LEARNED8)]
        made += [dataclasses.replace(case, name=smaller(case.name), line="small", batch=SMALL) for case in small]
    return made


def smaller(name: str) -> str:
    """The same case in small batches."""
    return f"{name}, batches of {SMALL:,}"


def seeds(setup: Setup) -> range:
    """Of what must lose nothing."""
    return range(SEEDS if thorough(setup) else 1)


def again(name: str, seed: int) -> str:
    """The same case with another seed."""
    return f"{name}, seed + {seed}" if seed else name


def compared(setup: Setup) -> list[str]:
    """The cases that are trained with all seeds."""
    return [FP32, INT16, ROW8, LEARNED8] + ([smaller(FP32), smaller(LEARNED8)] if thorough(setup) else [])


def trainings(setup: Setup) -> list[Case]:
    """Every case, those that are compared with all seeds."""
    made, names = cases(setup), compared(setup)
    for seed in seeds(setup)[1:]:
        made += [
            dataclasses.replace(case, name=again(case.name, seed), seed=seed)
            for case in cases(setup)
            if case.name in names
        ]
    return made


def examples(setup: Setup) -> int:
    """To train on."""
    return setup.count(EXAMPLES, 4 * SMALL)


def batch(setup: Setup, case: Case | None = None) -> int:
    """Examples of a step: few examples need small ones."""
    return SMALL if not thorough(setup) else BATCH if case is None else case.batch


def config(setup: Setup, case: Case) -> Config:
    """The run of one case: `thermocline train` would do the same with it."""
    keys, count = setup.count(KEYS, 100 * FIELDS), examples(setup)
    seed, size = setup.seed + case.seed, batch(setup, case)
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
    made = []
    for case in trainings(setup):
        wanted = config(setup, case)

        def run(work: Work, wanted: Config = wanted) -> Json | None:
            from experiments.training import train

            return train(wanted, work)

        seconds = 2 + examples(setup) / 200_000
        made.append(Step(name=case.name, settings=settings_of(wanted), seconds=seconds, run=run))
    return made


# ---- what it shows


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    return Section(
        text=[
            f"Generated ads (tc.SyntheticAds): {FIELDS} fields, Zipf {ZIPF}, {setup.count(KEYS, 100 * FIELDS):,} keys; "
            f"{examples(setup):,} examples are trained once in batches of {batch(setup):,}, AUC is on others. "
            f"Rows have {DIM} weights and one float32 of row-wise Adagrad; the weights are stored in b bits in every "
            "tier, decoded at look-up, updated in fp32 and rounded back: to the nearest (the talk's fixed rounding) or "
            "by chance, so that the mean is the value.",
            f"The range is the table's, [-{RANGE:g}, {RANGE:g}] in 2^b - 1 steps, or every row's own, by its largest "
            "weight, for 4 bytes a row more. A learned step begins at a range and is trained with the rows. "
            f"Other trainings spend the bytes of fp32 on more dims instead, and {WIDE:g} is a range too wide.",
            "Every update is rounded: noise grows with the number of updates of a row, and one step for all rows is "
            "either coarse for the small weights of most or clamps the large ones of hot rows. So a table's step is "
            "lossless only up to some hundreds of updates, for which the size of batches was chosen, and a row's own "
            "beyond. Trainings also differ by chance: what must lose "
            f"nothing is compared over {len(seeds(setup))} seed{'s' if len(seeds(setup)) > 1 else ''}.",
        ],
        parts=[_table(setup, results), _figure(setup, results), _seeds_table(setup, results)],
        claims=_claims(setup, results),
    )


def _auc(results: Mapping[str, Json], name: str) -> float:
    return float(results[name]["auc"])


def _table(setup: Setup, results: Mapping[str, Json]) -> Table:
    base = _auc(results, FP32)
    rows = []
    for case in cases(setup):
        got = results[case.name]
        auc = _auc(results, case.name)
        size = got["rows"] * got["row_bytes"]
        rows.append((case.name, case.precision.bits, case.dim, got["row_bytes"], size, auc, auc - base))
    return Table(
        name="table",
        title="Rows of few bits: bytes and AUC",
        columns=("rows", "bits", "dim", "bytes a row", "bytes of rows", "test AUC", "against fp32"),
        rows=rows,
        note="Bytes are those of rows as stored, with the optimizer's state.",
    )


def _figure(setup: Setup, results: Mapping[str, Json]) -> Figure:
    lines = [f"{rounding}, range of the {of}" for of in ("table", "row") for rounding in ROUNDINGS]
    series = []
    for line in [*lines, "learned"]:
        points = [case for case in cases(setup) if case.line == line and case.precision.range != WIDE]
        x = [case.precision.bits for case in points]
        series.append(Series(name=line, x=x, y=[_auc(results, case.name) for case in points]))
    return Figure(
        name="auc",
        title="AUC against the bits of a weight",
        x="bits",
        y="test AUC",
        x_axis="log2",
        series=series,
        levels={"fp32": _auc(results, FP32)},
    )


def _against(setup: Setup, results: Mapping[str, Json], name: str) -> list[float]:
    """AUC less that of fp32 in batches of the same size, per seed."""
    base = smaller(FP32) if name == smaller(LEARNED8) else FP32
    return [_auc(results, again(name, seed)) - _auc(results, again(base, seed)) for seed in seeds(setup)]


def _seeds_table(setup: Setup, results: Mapping[str, Json]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name in compared(setup):
        if name not in (FP32, smaller(FP32)):
            found = _against(setup, results, name)
            rows.append((name, statistics.fmean(found), *found))
    return Table(
        name="seeds",
        title="AUC against fp32, seed by seed",
        columns=("rows", "mean", *(f"seed {setup.seed + seed}" for seed in seeds(setup))),
        rows=rows,
        note="Each seed is another data set and another training. fp32 is trained in batches of the same size.",
    )


def _claims(setup: Setup, results: Mapping[str, Json]) -> list[Claim]:
    claims = []
    for of in ("table", "row"):
        pairs = [
            [_auc(results, f"int{b}, {rounding}, range of the {of}") for rounding in ROUNDINGS]
            for b in bits(setup, "nearest")
            if b <= 4
        ]
        claims.append(
            Claim(
                text=f"stochastic over fixed rounding at 4 bits and below, range of the {of}",
                holds=all(fixed < by_chance for fixed, by_chance in pairs),
                detail=", ".join(f"{by_chance:.4f} over {fixed:.4f}" for fixed, by_chance in pairs),
            )
        )
    claims.append(_lossless("16 bits", _against(setup, results, INT16)))
    claims.append(_lossless("8 bits with a step per row", _against(setup, results, ROW8)))
    claims.append(_lossless("8 bits, learned step", _against(setup, results, LEARNED8)))
    if thorough(setup):
        # Four times as many roundings: measured, not demanded.
        found = _against(setup, results, smaller(LEARNED8))
        claims.append(_lossless(f"8 bits, learned step, batches of {SMALL:,}", found, asserted=False))
    wide, learned = (_auc(results, f"int8, {name}") for name in ("wide", "learned from a wide range"))
    claims.append(
        Claim(
            text="a learned step corrects a range too wide",
            holds=wide < learned,
            detail=f"{learned:.4f} over {wide:.4f}",
        )
    )
    return claims


def _lossless(what: str, against: Sequence[float], asserted: bool = True) -> Claim:
    mean = statistics.fmean(against)
    each = ", ".join(f"{found:+.4f}" for found in against)
    return Claim(
        text=f"{what}: lossless, within {LOSSLESS}",
        holds=mean > -LOSSLESS,
        detail=f"{mean:+.5f} against fp32 (by seed: {each})",
        asserted=asserted,
    )


EXPERIMENT = Experiment(
    title="Rows of few bits: AUC and bytes, fixed against stochastic rounding", steps=steps, section=section
)
