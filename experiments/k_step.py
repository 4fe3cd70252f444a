"""k-step Adam: several ranks merge their dense parameters every k steps; AUC and speed against k."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from experiments import ranks as several
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
from thermocline.config.data import Synth
from thermocline.config.dense_sync import DenseSync
from thermocline.config.distributed import Dist
from thermocline.config.schema import Config

KS = (1, 5, 10, 20, 50, 100)
KEYS, FIELDS, DIM, HIDDEN, BATCH = 200_000, 26, 8, (256, 128), 128
EXAMPLES, TEST = 1_000_000, 100_000
ALIKE = 0.002
"""Of the claim, which is shown, not asserted: what merging every k steps may cost."""


def ranks(setup: Setup) -> int:
    """Two at least, four at most, one per core."""
    return min(4, max(2, setup.cores))


def chosen(setup: Setup) -> tuple[int, ...]:
    return KS if setup.effort >= 0.5 else (1, 20)


def config(setup: Setup, k: int) -> Config:
    """One training; ranks share its examples."""
    count = setup.count(EXAMPLES, 8 * BATCH * ranks(setup))
    synth = Synth(
        keys=KEYS, fields=FIELDS, seed=setup.seed, examples=count, valid_examples=0, test_examples=min(TEST, count)
    )
    steps = -(-count // (BATCH * ranks(setup)))
    alone = several.one_core_each(synth, dim=DIM, hidden=HIDDEN, batch=BATCH, log_every=max(1, steps // 10))
    return dataclasses.replace(alone, dist=Dist(dense_sync=DenseSync(every=k)))


def steps(setup: Setup) -> list[Step]:
    made = []
    for k in chosen(setup):
        wanted = config(setup, k)
        settings = {**settings_of(wanted), "ranks": ranks(setup), "cores": setup.cores}

        def run(work: Work, wanted: Config = wanted) -> Json:
            events = several.train(wanted, ranks(setup), work.folder, work.left)
            return {"auc": events[-1]["auc"], "examples_per_s": several.speed_of(events), "ranks": ranks(setup)}

        seconds = 10 + wanted.data.synth.examples / 40_000
        made.append(Step(name=f"k = {k}", settings=settings, seconds=seconds, run=run))
    return made


# ---- what it shows


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    ks = chosen(setup)
    auc, speed = ([results[f"k = {k}"][field] for k in ks] for field in ("auc", "examples_per_s"))
    count = int(results[f"k = {ks[0]}"]["ranks"])
    sent = [8 * (count - 1) / count * dense_parameters() * (1 if k == 1 else 2) / k for k in ks]
    rows = [(k, a, a - auc[0], s, size) for k, a, s, size in zip(ks, auc, speed, sent, strict=True)]
    worst = max(auc[0] - a for a in auc)
    return Section(
        text=[
            f"{results[f'k = {ks[0]}']['ranks']} ranks of this machine, one thread each: "
            f"{config(setup, 1).data.synth.examples:,} generated examples, {KEYS:,} keys, {dense_parameters():,} dense "
            "parameters. k = 1 averages gradients every step; otherwise every rank steps by itself and the models are "
            "merged every k steps, with the merged second moments as everybody's denominator until the next merge. "
            "Rows are exchanged every step in all cases. Between machines the link decides; within one there is none."
        ],
        parts=[
            Figure(name="auc", title="AUC against k", x="k", y="test AUC", x_axis="log2",
                   series=[Series(name="merged every k steps", x=ks, y=auc)]),
            Figure(name="speed", title="Speed against k", x="k", y="examples/s", x_axis="log2",
                   series=[Series(name="merged every k steps", x=ks, y=speed)]),
            Table(name="table", title="k-step Adam", rows=rows, predicted=("bytes a rank sends per step",),
                  columns=("k", "test AUC", "against k = 1", "examples/s", "bytes a rank sends per step"),
                  note="Bytes of dense parameters, by an all-reduce, in which each of n ranks sends 2 (n - 1) / n of "
                  "them; merging sends two tensors, models and second moments."),
        ],
        claims=[
            Claim(
                text=f"merging every k steps costs at most {ALIKE} of AUC", holds=worst <= ALIKE, asserted=False,
                detail=", ".join(f"k = {k}: {a:.4f}" for k, a in zip(ks, auc, strict=True)),
            )
        ],
    )  # fmt: skip


def dense_parameters() -> int:
    from thermocline.data.paper_models import mlp_parameters

    return mlp_parameters(FIELDS * DIM, HIDDEN)


EXPERIMENT = Experiment(title="k-step Adam: AUC and time against k", steps=steps, section=section)
