"""Scalability over ranks: measured on this machine's cores, predicted by `thermocline plan` there and beyond."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments import ranks as several
from experiments.experiment import (
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
from thermocline.config.schema import Config
from thermocline.utils.cpu_affinity import limit_cores

KEYS, FIELDS, DIM, HIDDEN, BATCH, STEPS, LOGS = 1_000_000, 26, 8, (256, 128), 1024, 600, 6
NODES = (2, 4, 8, 16)
"""Machines like this one, of predictions."""


def measured(count: int) -> list[int]:
    """Ranks: 1, 2, 4, ... and one per core."""
    return sorted({*(1 << n for n in range(count.bit_length())), count})


def config(setup: Setup, ranks: int) -> Config:
    """Each rank has one core and its own examples of every step."""
    steps = setup.count(STEPS, 2 * LOGS) // LOGS * LOGS
    synth = Synth(
        keys=KEYS, fields=FIELDS, seed=setup.seed, examples=BATCH * ranks * steps, valid_examples=0, test_examples=0
    )
    return several.one_core_each(synth, dim=DIM, hidden=HIDDEN, batch=BATCH, log_every=steps // LOGS)


def steps(setup: Setup) -> list[Step]:
    made = []
    for ranks in measured(setup.cores):
        wanted = config(setup, ranks)
        settings = {**settings_of(wanted), "ranks": ranks, "cores": setup.cores, "on_cores": ranks}

        def run(work: Work, ranks: int = ranks, wanted: Config = wanted) -> Json:
            with limit_cores(ranks):
                events = several.train(wanted, ranks, work.folder, work.left)
            return {"examples_per_s": several.speed_of(events)}

        seconds = 8 + wanted.train.log_every * LOGS * BATCH / 25_000
        made.append(Step(name=f"{ranks} ranks", settings=settings, seconds=seconds, run=run))
    settings = {**settings_of(config(setup, 1)), "cores": setup.cores, "nodes": list(NODES), "on_cores": 1}
    made.append(Step(name="predictions", settings=settings, seconds=40, run=lambda work: _predict(setup, work)))
    return made


def _predict(setup: Setup, work: Work) -> Json:
    """Of ranks on this machine, each of which brings its core; and of several machines with a rank per core."""
    from thermocline.planner.calibrate import measure
    from thermocline.planner.cost_model import predict
    from thermocline.planner.workload import cluster_of, workload_of

    node = measure(work.folder, num_cores=1)  # as each rank has: kernels by several threads cost more
    wanted = config(setup, 1)
    load = workload_of(wanted)

    def rate(nodes: int, ranks: int) -> float:
        part = dataclasses.replace(node, cpu=dataclasses.replace(node.cpu, cores=ranks))
        cluster = cluster_of(wanted, load, part, nodes=nodes, ranks=ranks)
        found: Any = predict(load, cluster, part).to_json()
        return float(found["examples_per_s"])

    here = [{"ranks": ranks, "examples_per_s": rate(1, ranks)} for ranks in measured(setup.cores)]
    beyond = [
        {"ranks": nodes * setup.cores, "nodes": nodes, "examples_per_s": rate(nodes, setup.cores)} for nodes in NODES
    ]
    return {"cores": setup.cores, "here": here, "beyond": beyond}


# ---- what it shows


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    told = results["predictions"]
    counts = [point["ranks"] for point in told["here"] if f"{point['ranks']} ranks" in results]
    rates = [results[f"{count} ranks"]["examples_per_s"] for count in counts]
    here = {point["ranks"]: point["examples_per_s"] for point in told["here"]}
    beyond = [(point["ranks"], point["examples_per_s"], point["nodes"]) for point in told["beyond"]]
    foreseen = [*here.items(), *((ranks, rate) for ranks, rate, _ in beyond)]
    rows: list[tuple[Any, ...]] = [
        (count, 1, rate, rate / rates[0], here[count], here[count] / here[counts[0]])
        for count, rate in zip(counts, rates, strict=True)
    ]
    rows += [(ranks, nodes, None, None, rate, rate / here[counts[0]]) for ranks, rate, nodes in beyond]
    return Section(
        text=[
            f"Every rank has one thread and {BATCH:,} examples of each step ({KEYS:,} keys, {FIELDS} fields); rows "
            f"belong to ranks by their hash. Measured: on as many of this machine's {told['cores']} cores as there "
            "are ranks. Predicted: by `thermocline plan`, from the costs of one core and of links, measured here, for "
            "the same ranks and for more machines like this one, whose network is this machine's loopback."
        ],
        parts=[
            Figure(
                name="speed", title="Examples per second against ranks", x="ranks", y="examples/s", x_axis="log2",
                y_axis="log10",
                series=[
                    Series(name="this machine", x=counts, y=rates),
                    Series(name="plan", x=[x for x, _ in foreseen], y=[y for _, y in foreseen], kind="predicted"),
                ],
            ),
            Figure(
                name="speed-up", title="Speed-up over one rank", x="ranks", y="times", x_axis="log2", y_axis="log2",
                series=[
                    Series(name="this machine", x=counts, y=[rate / rates[0] for rate in rates]),
                    Series(
                        name="plan", x=[x for x, _ in foreseen], y=[y / here[counts[0]] for _, y in foreseen],
                        kind="predicted",
                    ),
                ],
            ),
            Table(
                name="table", title="Scalability", rows=rows,
                columns=("ranks", "machines", "examples/s", "speed-up", "examples/s foreseen", "speed-up foreseen"),
                predicted=("examples/s foreseen", "speed-up foreseen"),
            ),
        ],
    )  # fmt: skip


EXPERIMENT = Experiment(title="Scalability over ranks, measured and predicted", steps=steps, section=section)
