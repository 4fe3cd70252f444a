"""AUC over time: one stream trained through the tiers, with everything in the top one, and by the MPI rival."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping

from experiments import mpi
from experiments.experiment import (
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

KEYS, FIELDS, NONZEROS, DIM, HIDDEN = 2_000_000_000, 25, 50, 8, (64, 32)
EXAMPLES, TEST, BATCH, DEPTH, POINTS = 1_000_000, 100_000, 256, 3, 40
TIERS, MEMORY, RIVAL = "through the tiers", "everything in the top tier", "the MPI rival"
ALIKE = 0.0005
"""Two AUC nearer than this are the same to the source."""


def keys(setup: Setup) -> int:
    return max(200_000, round(KEYS / setup.scale))


def config(setup: Setup, side: str) -> Config:
    """The same training; only where the rows are differs."""
    examples = setup.count(EXAMPLES, 4 * BATCH)
    row = 4 * 2 * DIM
    whole = round(keys(setup) * (row + 80) * 1.1) + (64 << 20)
    least = (DEPTH + 1) * BATCH * NONZEROS * (row + 80)  # the batches in flight
    tiers = Tiers(device=setup.device if side != RIVAL else "cpu", mem=whole, hbm=whole)
    if side == TIERS:
        tiers = dataclasses.replace(
            tiers,
            hbm=max(least, row * keys(setup) // 10),
            mem=max(least, row * keys(setup) * 4 // 10),
            ssd="rows",
            ssd_mem=(16 << 20) + 8 * keys(setup),
        )
    steps = -(-examples // BATCH)
    return Config(
        data=Data(
            format="synth",
            synth=Synth(
                keys=keys(setup), fields=FIELDS, nonzeros=NONZEROS, seed=setup.seed, examples=examples,
                valid_examples=0, test_examples=min(TEST, examples),
            ),
        ),
        model=ModelConfig(
            name="dnn", dim=DIM, hidden=HIDDEN, dropout=0.0, embedding_l2=0.0, initial=0.01, batch_norm=False
        ),
        tiers=tiers,
        train=Train(
            batch_size=BATCH, optimizer="adagrad", lr=0.05, dense_optimizer="adam", dense_lr=1e-3, seed=setup.seed,
            depth=DEPTH, log_every=max(1, steps // POINTS), checkpoint_minutes=None,
        ),
    )  # fmt: skip


def sides(setup: Setup) -> list[str]:
    return [TIERS, MEMORY, *([RIVAL] if setup.rival else [])]


def steps(setup: Setup) -> list[Step]:
    made = []
    for side in sides(setup):
        wanted = config(setup, side)

        def run(work: Work, side: str = side, wanted: Config = wanted) -> Json:
            return _rival(wanted, setup.cores, work) if side == RIVAL else _ours(wanted, work)

        seconds = 2 + wanted.data.synth.examples / 40_000
        ranks = setup.cores if side == RIVAL else 1
        settings = {"side": side, "ranks": ranks, "cores": setup.cores, **settings_of(wanted)}
        made.append(Step(name=side, settings=settings, seconds=seconds, run=run))
    return made


def _ours(wanted: Config, work: Work) -> Json:
    """From the beginning each time: a break would show in the curve."""
    from experiments.training import watch

    shutil.rmtree(work.folder / "run", ignore_errors=True)
    shutil.rmtree(work.folder / "rows", ignore_errors=True)
    ssd = None if wanted.tiers.ssd is None else str(work.folder / wanted.tiers.ssd)
    rows, test = watch(dataclasses.replace(wanted, tiers=dataclasses.replace(wanted.tiers, ssd=ssd)), work)
    return {"points": [_point(row) for row in rows], "test_auc": test["auc"], "ranks": 1}


def _rival(wanted: Config, ranks: int, work: Work) -> Json:
    """One rank per core."""
    each = dataclasses.replace(wanted, tiers=dataclasses.replace(wanted.tiers, hbm=None))
    events = mpi.train(each, ranks, work.folder, work.left)
    points = [_point(event) for event in events if event["event"] == "train"]
    return {"points": points, "test_auc": events[-1]["auc"], "ranks": ranks}


def _point(row: Mapping[str, float]) -> dict[str, float]:
    return {"examples": row["examples"], "seconds": row["seconds"], "auc": row["auc"]}


# ---- what it shows


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    runs = {side: results[side] for side in sides(setup)}
    tiers = runs[TIERS]
    others = {side: run for side, run in runs.items() if side != TIERS}
    apart = {
        side: [(a["examples"], a["auc"] - b["auc"]) for a, b in zip(tiers["points"], run["points"], strict=False)]
        for side, run in others.items()
    }
    rival = f"The MPI rival did not run: {mpi.missing()}." if RIVAL not in runs else (
        f"The MPI rival (baselines/mpi_ps) has {runs[RIVAL]['ranks']} ranks, one per core, with all rows in memory."
    )  # fmt: skip
    return Section(
        text=[
            f"{config(setup, TIERS).data.synth.examples:,} generated examples, {keys(setup):,} keys, {NONZEROS} "
            f"nonzeros each, trained once, in one order. The tiers have the source's ratios for model E: DRAM holds "
            f"40 % of the rows' bytes{', HBM 10 %' if setup.device == 'cuda' else ''}, the rest is on SSD. AUC is "
            f"that of all examples so far, each scored before it was trained on. {rival}"
        ],
        parts=[
            _curves("time", "AUC over time", "seconds", runs),
            _curves("examples", "AUC over examples", "examples", runs),
            Figure(
                name="difference",
                title="AUC through the tiers minus the others'",
                x="examples",
                y="difference of AUC",
                series=[
                    Series(name=f"minus {side}", x=[x for x, _ in points], y=[y for _, y in points])
                    for side, points in apart.items()
                ],
            ),
            Table(
                name="table",
                title="At the end",
                columns=("rows are", "test AUC", "seconds", "ranks"),
                rows=[
                    (side, run["test_auc"], run["points"][-1]["seconds"], run["ranks"]) for side, run in runs.items()
                ],
            ),
        ],
        claims=[_claim(side, tiers, run, [y for _, y in apart[side]]) for side, run in others.items()],
    )


def _claim(side: str, tiers: Json, run: Json, apart: list[float]) -> Claim:
    return Claim(
        text=f"AUC through the tiers is within {ALIKE} of that of {side}",
        holds=abs(tiers["test_auc"] - run["test_auc"]) <= ALIKE,
        detail=f"test AUC {tiers['test_auc']:.6f} and {run['test_auc']:.6f}; the curves end "
        f"{abs(apart[-1]):.6f} apart, at most {max(map(abs, apart)):.6f}",
    )


def _curves(name: str, title: str, x: str, runs: Mapping[str, Json]) -> Figure:
    series = [
        Series(name=side, x=[p[x] for p in run["points"]], y=[p["auc"] for p in run["points"]])
        for side, run in runs.items()
    ]
    return Figure(name=name, title=title, x=x, y="AUC so far", series=series)


EXPERIMENT = Experiment(title="AUC over time", steps=steps, section=section)
