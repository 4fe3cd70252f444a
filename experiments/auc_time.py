"""AUC over time of one training: through the tiers, with all rows in the top tier, and by the MPI baseline."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping

from experiments import launch
from experiments.experiment import (
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

KEYS, FIELDS, NONZEROS, DIM, HIDDEN = 2_000_000_000, 25, 50, 8, (64, 32)
EXAMPLES, TEST, BATCH, DEPTH, POINTS = 1_000_000, 100_000, 256, 3, 40
TIERS, MEMORY, MPI = "through the tiers", "everything in the top tier", "MPI parameter server"
TOLERANCE = 0.0005
"""Largest difference between two AUCs that count as equal."""


def keys(setup: Setup) -> int:
    """Return the number of keys."""
    return max(200_000, round(KEYS / setup.scale))


def config(setup: Setup, side: str) -> Config:
    """Configure one side of the comparison; the sides differ only in the location of the rows."""
    examples = setup.count(EXAMPLES, 4 * BATCH)
    row = 4 * 2 * DIM
    whole = round(keys(setup) * (row + 80) * 1.1) + (64 << 20)
    in_flight = (DEPTH + 1) * BATCH * NONZEROS * (row + 80)  # bytes of the batches in the pipeline
    tiers = Tiers(device=setup.device if side != MPI else "cpu", mem=whole, hbm=whole)
    if side == TIERS:
        tiers = dataclasses.replace(
            tiers,
            hbm=max(in_flight, row * keys(setup) // 10),
            mem=max(in_flight, row * keys(setup) * 4 // 10),
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
    """Return the sides that can run."""
    return [TIERS, MEMORY, *([MPI] if setup.mpi else [])]


def steps(setup: Setup) -> list[Step]:
    """Return one training per side."""
    made = []
    for side in sides(setup):
        side_config = config(setup, side)

        def run(context: StepContext, side: str = side, side_config: Config = side_config) -> Json:
            return _run_mpi(side_config, setup.cores, context) if side == MPI else _run(side_config, context)

        ranks = setup.cores if side == MPI else 1
        settings = {"side": side, "ranks": ranks, "cores": setup.cores, **config_settings(side_config)}
        seconds = 2 + side_config.data.synth.examples / 40_000
        made.append(Step(name=side, settings=settings, expected_seconds=seconds, run=run))
    return made


def _run(side_config: Config, context: StepContext) -> Json:
    """Train from the start in each call: an interruption would distort the curve."""
    from experiments.training import train_logged

    shutil.rmtree(context.folder / "run", ignore_errors=True)
    shutil.rmtree(context.folder / "rows", ignore_errors=True)
    ssd = None if side_config.tiers.ssd is None else str(context.folder / side_config.tiers.ssd)
    tiers = dataclasses.replace(side_config.tiers, ssd=ssd)
    rows, test = train_logged(dataclasses.replace(side_config, tiers=tiers), context)
    return {"points": [_point(row) for row in rows], "test_auc": test["auc"], "ranks": 1}


def _run_mpi(side_config: Config, ranks: int, context: StepContext) -> Json:
    """Train with one rank per core."""
    without_gpu = dataclasses.replace(side_config, tiers=dataclasses.replace(side_config.tiers, hbm=None))
    events = launch.train_mpi(without_gpu, ranks, context.folder, context.seconds_left)
    points = [_point(event) for event in events if event["event"] == "train"]
    return {"points": points, "test_auc": events[-1]["auc"], "ranks": ranks}


def _point(row: Mapping[str, float]) -> dict[str, float]:
    return {"examples": row["examples"], "seconds": row["seconds"], "auc": row["auc"]}


# ---- section of the report


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    """Show the curves, their differences and the test AUCs."""
    runs = {side: results[side] for side in sides(setup)}
    tiers = runs[TIERS]
    others = {side: run for side, run in runs.items() if side != TIERS}
    differences = {
        side: [(a["examples"], a["auc"] - b["auc"]) for a, b in zip(tiers["points"], run["points"], strict=False)]
        for side, run in others.items()
    }
    return Section(
        text=[
            f"One pass over {config(setup, TIERS).data.synth.examples:,} generated examples with {keys(setup):,} keys "
            f"and {NONZEROS} nonzeros per example. Every side trains the same examples in the same order.",
            f"The tiers have the ratios of Zhao et al. (2020) for model E: DRAM holds 40 % of the rows' bytes"
            f"{', HBM 10 %' if setup.device == 'cuda' else ''}, and SSD holds the rest. AUC is progressive: it covers "
            f"all examples so far, each scored before it was trained on. {_mpi_text(runs)}",
        ],
        parts=[
            _curves("time", "AUC over time", "seconds", runs),
            _curves("examples", "AUC over examples", "examples", runs),
            Figure(
                name="difference",
                title="AUC through the tiers minus AUC of the others",
                x_label="examples",
                y_label="difference of AUC",
                series=[
                    Series(name=f"minus {side}", x=[x for x, _ in points], y=[y for _, y in points])
                    for side, points in differences.items()
                ],
                hlines={"bound of the test AUC": -TOLERANCE},
            ),
            Table(
                name="table",
                title="AUC and time at the end of the training",
                columns=("location of rows", "test AUC", "seconds", "ranks"),
                rows=[
                    (side, run["test_auc"], run["points"][-1]["seconds"], run["ranks"]) for side, run in runs.items()
                ],
            ),
        ],
        claims=[_claim(side, tiers, run, [y for _, y in differences[side]]) for side, run in others.items()],
    )


def _mpi_text(runs: Mapping[str, Json]) -> str:
    if MPI not in runs:
        return f"The MPI parameter server did not run: {launch.mpi_missing()}."
    ranks = runs[MPI]["ranks"]
    return f"The MPI parameter server (baselines/mpi_ps) has {ranks} ranks, one per core, and all rows in memory."


def _claim(side: str, tiers: Json, run: Json, differences: list[float]) -> Claim:
    return Claim(
        text=f"AUC through the tiers is within {TOLERANCE} of the AUC {'of the' if side == MPI else 'with'} {side}",
        holds=abs(tiers["test_auc"] - run["test_auc"]) <= TOLERANCE,
        detail=f"Test AUC {tiers['test_auc']:.6f} and {run['test_auc']:.6f}; the curves differ by "
        f"{abs(differences[-1]):.6f} at the end, by at most {max(map(abs, differences)):.6f}",
        part="difference",
        ours=f"{tiers['test_auc'] - run['test_auc']:+.6f}",
    )


def _curves(name: str, title: str, x: str, runs: Mapping[str, Json]) -> Figure:
    series = [
        Series(name=side, x=[p[x] for p in run["points"]], y=[p["auc"] for p in run["points"]])
        for side, run in runs.items()
    ]
    return Figure(name=name, title=title, x_label=x, y_label="progressive AUC", series=series)


EXPERIMENT = Experiment(title="AUC over time", steps=steps, section=section)
