"""AUC over time: one stream trained through the tiers and with everything in the top one. Examples are scored first."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping
from typing import Any

from thermocline.data.synth import SyntheticAds
from thermocline.reproduce.experiment import Claim, Experiment, Figure, Json, Section, Series, Setup, Step, Table, Work
from thermocline.tables.optimizers import Adagrad

KEYS, FIELDS, NONZEROS, DIM, HIDDEN = 2_000_000_000, 25, 50, 8, (64, 32)
EXAMPLES, BATCH, DEPTH, POINTS = 2_000_000, 256, 3, 40
OPTIMIZER, DENSE_LR, TEST = Adagrad(lr=0.05), 1e-3, 50_000
SIDES = {"tiers": "through the tiers", "memory": "everything in the top tier"}
ALIKE = 0.0005
"""Two AUC nearer than this are the same to the source."""


def keys(setup: Setup) -> int:
    return max(200_000, round(KEYS / setup.scale))


def examples(setup: Setup) -> int:
    return setup.count(EXAMPLES, 4 * BATCH)


def steps(setup: Setup) -> list[Step]:
    made = []
    for side in SIDES:
        settings = {
            "side": side, "keys": keys(setup), "examples": examples(setup), "seed": setup.seed, "device": setup.device,
            "fields": FIELDS, "nonzeros": NONZEROS, "dim": DIM, "hidden": list(HIDDEN), "batch": BATCH, "depth": DEPTH,
            "optimizer": dataclasses.asdict(OPTIMIZER), "dense_lr": DENSE_LR, "test": TEST, "points": POINTS,
        }  # fmt: skip

        def run(work: Work, side: str = side) -> Json:
            return _run(setup, side == "tiers", work)

        made.append(Step(name=SIDES[side], settings=settings, seconds=2 + examples(setup) / 40_000, run=run))
    return made


def _run(setup: Setup, tiers: bool, work: Work) -> Json:
    import torch

    from thermocline.metrics import ExactMetrics
    from thermocline.models import ModelConfig, build
    from thermocline.reproduce.training import stream, table as make_table

    ads = SyntheticAds(
        keys=keys(setup), fields=FIELDS, nonzeros=NONZEROS, batch_size=BATCH, examples=examples(setup), seed=setup.seed
    )
    row = 4 * 2 * DIM
    whole = round(keys(setup) * (row + 64) * 1.1) + (64 << 20)
    flight = (DEPTH + 1) * BATCH * NONZEROS * (row + 64)  # the least: the batches in flight
    folder = work.folder / "rows"
    shutil.rmtree(folder, ignore_errors=True)  # of a call that was cut short
    table = make_table(
        DIM, OPTIMIZER, setup, hbm=max(flight, row * keys(setup) // 10) if tiers else whole,
        mem=max(flight, row * keys(setup) * 4 // 10) if tiers else whole,
        ssd=folder if tiers else None, ssd_mem=(16 << 20) + 8 * keys(setup),
    )  # fmt: skip
    try:
        torch.manual_seed(setup.seed)
        config = ModelConfig(name="dnn", dim=DIM, hidden=HIDDEN, dropout=0.0, initial=0.01)
        model = build(config, table, FIELDS)
        if table.hbm is not None:
            model.to(table.hbm.device)
        curve = _Curve(len(ads), work)
        dense = [torch.optim.Adam(model.parameters(), lr=DENSE_LR)]
        stream(ads, table, model, dense, depth=DEPTH, after=curve.after)
        model.eval()
        test = ExactMetrics()
        with torch.no_grad():
            for batch in ads.split("test", examples=TEST):
                test.update(model(batch).cpu(), batch.label)
        return {"points": curve.points, "test_auc": test.compute()["auc"], "mem_hit_rate": table.tier.stats().hit_rate}
    finally:
        table.close()


class _Curve:
    """AUC of the examples since the last point, each scored before it was trained on."""

    def __init__(self, batches: int, work: Work) -> None:
        from thermocline.metrics import ExactMetrics

        self._metrics: Any = ExactMetrics
        self._every = max(1, batches // POINTS)
        self._batches, self._work = batches, work
        self._window, self._seen, self._examples = ExactMetrics(), 0, 0
        self._begin = time.perf_counter()
        self.points: list[dict[str, float]] = []

    def after(self, batch: Any, logits: Any, stages: Any) -> bool:
        self._window.update(logits.cpu(), batch.label)
        self._seen += 1
        self._examples += batch.examples
        if self._seen % self._every == 0:
            seconds, auc = time.perf_counter() - self._begin, self._window.compute()["auc"]
            self.points.append({"examples": self._examples, "seconds": seconds, "auc": auc})
            self._window = self._metrics()
            self._work.tell(self._seen / self._batches)
        return self._work.left > 20


# ---- what it shows


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    runs = {name: results[name] for name in SIDES.values()}
    tiers, memory = runs.values()
    shared = list(zip(tiers["points"], memory["points"], strict=False))
    apart = [a["auc"] - b["auc"] for a, b in shared]
    return Section(
        text=[
            f"{examples(setup):,} generated examples, {keys(setup):,} keys, {NONZEROS} nonzeros each, trained once, in "
            f"one order. The tiers have the source's ratios for model E: DRAM holds 40 % of the rows' bytes"
            f"{', HBM 10 %' if setup.device == 'cuda' else ''}, the rest is on SSD. AUC is that of the examples since "
            "the point before, each scored before it was trained on."
        ],
        parts=[
            _curves("time", "AUC over time", "seconds", "seconds", runs),
            _curves("examples", "AUC over examples", "examples", "examples", runs),
            Figure(
                name="difference",
                title="Difference of the two, by examples",
                x="examples",
                y="AUC through the tiers minus AUC in the top tier",
                series=[Series(name="difference", x=[a["examples"] for a, _ in shared], y=apart)],
            ),
            Table(
                name="table",
                title="At the end",
                columns=("rows are", "test AUC", "seconds", "DRAM hit rate"),
                rows=[
                    (name, run["test_auc"], run["points"][-1]["seconds"], run["mem_hit_rate"])
                    for name, run in runs.items()
                ],
            ),
        ],
        claims=[
            Claim(
                text=f"the tiers cost no accuracy: AUC within {ALIKE}",
                holds=max(map(abs, [*apart, tiers["test_auc"] - memory["test_auc"]])) <= ALIKE,
                detail=f"test AUC {tiers['test_auc']:.6f} and {memory['test_auc']:.6f}, "
                f"largest difference of the curves {max(map(abs, apart)):.6f}",
            )
        ],
    )


def _curves(name: str, title: str, x: str, field: str, runs: Mapping[str, Json]) -> Figure:
    series = [
        Series(name=label, x=[p[field] for p in run["points"]], y=[p["auc"] for p in run["points"]])
        for label, run in runs.items()
    ]
    return Figure(name=name, title=title, x=x, y="AUC of new examples", series=series)


EXPERIMENT = Experiment(title="AUC over time", steps=steps, section=section)
