"""The top tier's time against nonzeros: look up and pool, then sum gradients and update, all rows being there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from experiments.experiment import Experiment, Figure, Json, Section, Series, Setup, Step, Table, Work
from thermocline.data.synthetic import SyntheticAds
from thermocline.embedding.optimizers import Adagrad

COUNTS = (50, 100, 200, 300, 400, 500)
FIELDS, DIM, KEYS = 25, 8, 1_000_000
REPEAT = 9
OPTIMIZER = Adagrad(lr=0.05)


def batch(setup: Setup) -> int:
    """Examples."""
    return setup.count(1024, 64)


def steps(setup: Setup) -> list[Step]:
    made = []
    for nonzeros in COUNTS:
        settings = {
            "nonzeros": nonzeros, "batch": batch(setup), "seed": setup.seed, "device": setup.device, "fields": FIELDS,
            "dim": DIM, "keys": KEYS, "repeat": REPEAT, "optimizer": dataclasses.asdict(OPTIMIZER),
            "cores": setup.cores,
        }  # fmt: skip

        def run(work: Work, nonzeros: int = nonzeros) -> Json:
            return _run(setup, nonzeros)

        made.append(Step(name=f"{nonzeros} nonzeros", settings=settings, seconds=1.0, run=run))
    return made


def _run(setup: Setup, nonzeros: int) -> Json:
    import torch

    from experiments.training import seconds_of, table as make_table, torch_threads
    from thermocline.embedding.bag import EmbeddingBag

    torch.set_num_threads(torch_threads())
    ads = SyntheticAds(
        keys=KEYS, fields=FIELDS, nonzeros=nonzeros, batch_size=batch(setup), examples=batch(setup), seed=setup.seed
    )
    table = make_table(DIM, OPTIMIZER, setup, hbm=256 << 20, mem=256 << 20)
    try:
        bag = EmbeddingBag(table, FIELDS)
        one = ads.batch(0)
        gradient = None

        def forward() -> None:
            nonlocal gradient
            pooled = bag(one)
            gradient = torch.ones_like(pooled) if gradient is None else gradient
            pooled.backward(gradient)

        def whole() -> None:
            forward()
            table.step()

        whole()  # the rows are there from now on
        seconds = seconds_of(whole, repeat=REPEAT, device=setup.device)
        return {"ids": len(one.ids), "seconds": seconds}
    finally:
        table.close()


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    top = "HBM" if setup.device == "cuda" else "DRAM"
    runs = [(count, results[f"{count} nonzeros"]) for count in COUNTS]
    line = Series(name=f"rows in {top}", x=[count for count, _ in runs], y=[run["seconds"] * 1000 for _, run in runs])
    rows = [(count, run["ids"], run["seconds"] * 1000, run["ids"] / run["seconds"] / 1e6) for count, run in runs]
    return Section(
        text=[
            f"One batch of {batch(setup)} examples whose rows are all in {top}: find, pin and pool them, sum the "
            f"gradients per key and update in place. Rows of {DIM} weights with Adagrad; {KEYS:,} keys; "
            f"median of {REPEAT}."
        ],
        parts=[
            Figure(
                name="time", title=f"Time of {top} per batch against nonzeros", x="nonzeros per example", y="ms",
                series=[line],
            ),
            Table(
                name="table", title="The same as a table",
                columns=("nonzeros per example", "ids", "ms", "million ids/s"), rows=rows,
            ),
        ],
    )  # fmt: skip


EXPERIMENT = Experiment(title="Time of the top tier against nonzeros", steps=steps, section=section)
