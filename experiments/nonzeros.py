"""Time of the top tier against nonzeros per example: look-up, pooling, gradient sums and update."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from experiments.experiment import Experiment, Figure, Json, Section, Series, Setup, Step, StepContext, Table
from thermocline.data.synthetic import SyntheticAds
from thermocline.embedding.optimizers import Adagrad

COUNTS = (50, 100, 200, 300, 400, 500)
FIELDS, DIM, KEYS = 25, 8, 1_000_000
REPEAT = 9
OPTIMIZER = Adagrad(lr=0.05)


def batch_size(setup: Setup) -> int:
    """Return the number of examples."""
    return setup.count(1024, 64)


def steps(setup: Setup) -> list[Step]:
    """Return one measurement per number of nonzeros."""
    made = []
    for nonzeros in COUNTS:
        settings = {
            "nonzeros": nonzeros, "batch": batch_size(setup), "seed": setup.seed, "device": setup.device,
            "fields": FIELDS, "dim": DIM, "keys": KEYS, "repeat": REPEAT, "optimizer": dataclasses.asdict(OPTIMIZER),
            "cores": setup.cores,
        }  # fmt: skip

        def run(context: StepContext, nonzeros: int = nonzeros) -> Json:
            return _run(setup, nonzeros)

        made.append(Step(name=f"{nonzeros} nonzeros", settings=settings, expected_seconds=1.0, run=run))
    return made


def _run(setup: Setup, nonzeros: int) -> Json:
    import torch

    from experiments.training import make_table, median_seconds, torch_threads
    from thermocline.embedding.bag import EmbeddingBag

    torch.set_num_threads(torch_threads())
    size = batch_size(setup)
    ads = SyntheticAds(keys=KEYS, fields=FIELDS, nonzeros=nonzeros, batch_size=size, examples=size, seed=setup.seed)
    table = make_table(DIM, OPTIMIZER, setup, hbm=256 << 20, mem=256 << 20)
    try:
        bag = EmbeddingBag(table, FIELDS)
        batch = ads.batch(0)
        gradient = None

        def train_step() -> None:
            nonlocal gradient
            pooled = bag(batch)
            gradient = torch.ones_like(pooled) if gradient is None else gradient
            pooled.backward(gradient)
            table.step()

        train_step()  # inserts the rows
        seconds = median_seconds(train_step, repeat=REPEAT, device=setup.device)
        return {"ids": len(batch.ids), "seconds": seconds}
    finally:
        table.close()


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    """Show the time per batch and the ids per second."""
    top = setup.top_tier
    runs = [(count, results[f"{count} nonzeros"]) for count in COUNTS]
    line = Series(name=f"rows in {top}", x=[count for count, _ in runs], y=[run["seconds"] * 1000 for _, run in runs])
    rows = [(count, run["ids"], run["seconds"] * 1000, run["ids"] / run["seconds"] / 1e6) for count, run in runs]
    return Section(
        text=[
            f"One batch of {batch_size(setup)} examples whose rows are all in {top}: find, pin and pool the rows, sum "
            f"the gradients per key, update in place. Rows have {DIM} weights and Adagrad's state; {KEYS:,} keys; "
            f"median of {REPEAT} repetitions."
        ],
        parts=[
            Figure(
                name="time", title=f"Time of {top} per batch against nonzeros", x_label="nonzeros per example",
                y_label="ms", series=[line], y_from=0,
            ),
            Table(
                name="table", title=f"Time of {top} per batch",
                columns=("nonzeros per example", "ids", "ms", "million ids/s"), rows=rows,
            ),
        ],
    )  # fmt: skip


EXPERIMENT = Experiment(title="Time of the top tier against nonzeros", steps=steps, section=section)
