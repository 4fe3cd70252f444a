"""Rows of few bits: AUC and bytes against b, fixed against stochastic rounding, a learned step, and the same bytes as
a larger dim."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from thermocline.config import Config, Tiers, Train
from thermocline.data.schema import Data, Synth
from thermocline.models.config import ModelConfig
from thermocline.reproduce.experiment import (
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
from thermocline.tables.precision import Kind, Precision, Rounding

KEYS, FIELDS, ZIPF, DIM, HIDDEN, BATCH = 200_000, 16, 1.05, 8, (64, 32), 1024
EXAMPLES, TEST = 1_000_000, 200_000
RANGE = 1.0
"""Of a table's weights: nearly all of these trainings' lie inside."""
WIDE = 4 * RANGE
"""As somebody would choose who does not know."""
LEARN = 0.01
LOSSLESS = 0.0005
"""AUC within which nothing is lost."""
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


def thorough(setup: Setup) -> bool:
    """Whether all is trained that the figure could have."""
    return setup.effort >= 0.5


def bits(setup: Setup, rounding: Rounding) -> list[int]:
    """Those of a line of the figure."""
    if thorough(setup):
        return list(KINDS)
    return [4, 8, 16] if rounding == "stochastic" else [4, 8]


def cases(setup: Setup) -> list[Case]:
    """Every training."""
    made = [Case(name="fp32", line="fp32", precision=Precision())]
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
            precision = Precision(kind=KINDS[b], range=limit, learn=LEARN)
            made.append(Case(name=f"int{b}, learned from {start} range", line="learned", precision=precision))
        made.append(Case(name=f"int{b}, wide", line="wide", precision=Precision(kind=KINDS[b], range=WIDE)))
    for b in (8, 16) if thorough(setup) else (8,):
        dim = DIM * 32 // b
        made.append(
            Case(name=f"int{b}, dim {dim}", line="more dims", precision=Precision(kind=KINDS[b], range=RANGE), dim=dim)
        )
    return made


def examples(setup: Setup) -> int:
    """To train on."""
    return setup.count(EXAMPLES, 4 * BATCH)


def config(setup: Setup, case: Case) -> Config:
    """The run of one case: `thermocline train` would do the same with it."""
    keys, count = setup.count(KEYS, 100 * FIELDS), examples(setup)
    synth = Synth(
        keys=keys, fields=FIELDS, zipf=ZIPF, seed=setup.seed,
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
            batch_size=BATCH, optimizer="rowwise_adagrad", lr=0.05, dense_optimizer="adam", dense_lr=1e-3,
            seed=setup.seed,
        ),
    )  # fmt: skip


def steps(setup: Setup) -> list[Step]:
    made = []
    for case in cases(setup):
        wanted = config(setup, case)

        def run(work: Work, wanted: Config = wanted) -> Json | None:
            from thermocline.reproduce.training import train

            return train(wanted, work)

        seconds = 2 + examples(setup) / 80_000
        made.append(Step(name=case.name, settings=settings_of(wanted), seconds=seconds, run=run))
    return made


# ---- what it shows


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    return Section(
        text=[
            f"Generated ads (tc.SyntheticAds): {FIELDS} fields, Zipf {ZIPF}, {setup.count(KEYS, 100 * FIELDS):,} keys; "
            f"{examples(setup):,} examples are trained once, AUC is on others. Rows have {DIM} weights and one float32 "
            "of row-wise Adagrad; the weights are stored in b bits in every tier, decoded at look-up, updated in fp32 "
            "and rounded back: to the nearest (the talk's fixed rounding) or by chance, so that the mean is the value.",
            f"The range is the table's, [-{RANGE:g}, {RANGE:g}] in 2^b - 1 steps, or every row's own, by its largest "
            "weight, for 4 bytes a row more. A learned step begins at a range and is trained with the rows. "
            f"The last trainings spend the bytes of fp32 on more dims instead, and {WIDE:g} is a range too wide.",
        ],
        parts=[_table(setup, results), _figure(setup, results)],
        claims=_claims(setup, results),
    )


def _auc(results: Mapping[str, Json], name: str) -> float:
    return float(results[name]["auc"])


def _table(setup: Setup, results: Mapping[str, Json]) -> Table:
    base = _auc(results, "fp32")
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
        levels={"fp32": _auc(results, "fp32")},
    )


def _claims(setup: Setup, results: Mapping[str, Json]) -> list[Claim]:
    base = _auc(results, "fp32")
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
    claims.append(_lossless("16 bits", base, _auc(results, "int16, stochastic, range of the table"), True))
    claims.append(
        _lossless("8 bits with a step per row", base, _auc(results, "int8, stochastic, range of the row"), True)
    )
    # One step for all rows is not as good as one for each: measured, not demanded.
    claims.append(_lossless("8 bits, learned step", base, _auc(results, "int8, learned from a good range"), False))
    wide, learned = (_auc(results, f"int8, {name}") for name in ("wide", "learned from a wide range"))
    claims.append(
        Claim(
            text="a learned step corrects a range too wide",
            holds=wide < learned,
            detail=f"{learned:.4f} over {wide:.4f}",
        )
    )
    return claims


def _lossless(what: str, base: float, auc: float, asserted: bool) -> Claim:
    return Claim(
        text=f"{what}: lossless, within {LOSSLESS}",
        holds=auc > base - LOSSLESS,
        detail=f"{auc:.4f}, fp32 {base:.4f}",
        asserted=asserted,
    )


EXPERIMENT = Experiment(
    title="Rows of few bits: AUC and bytes, fixed against stochastic rounding", steps=steps, section=section
)
