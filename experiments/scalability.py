"""Speed against the number of ranks: measured on this machine, predicted by `thermocline plan` for more machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments import launch
from experiments.experiment import (
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
from thermocline.config.data import Synth
from thermocline.config.schema import Config
from thermocline.utils.cpu_affinity import limit_cores

KEYS, FIELDS, DIM, HIDDEN, BATCH, STEPS, LOGS = 1_000_000, 26, 8, (256, 128), 1024, 600, 6
NODES = (2, 4, 8, 16)
"""Numbers of machines like this one for the predictions."""


def rank_counts(cores: int) -> list[int]:
    """Return the measured numbers of ranks: the powers of two up to the number of cores, and that number."""
    return sorted({*(1 << n for n in range(cores.bit_length())), cores})


def config(setup: Setup, ranks: int) -> Config:
    """Configure a training in which each rank has one core and BATCH examples per step."""
    steps = setup.count(STEPS, 2 * LOGS) // LOGS * LOGS
    synth = Synth(
        keys=KEYS, fields=FIELDS, seed=setup.seed, examples=BATCH * ranks * steps, valid_examples=0, test_examples=0
    )
    return launch.one_core_config(synth, dim=DIM, hidden=HIDDEN, batch=BATCH, log_every=steps // LOGS)


def steps(setup: Setup) -> list[Step]:
    """Return one training per number of ranks, and the predictions."""
    made = []
    for ranks in rank_counts(setup.cores):
        rank_config = config(setup, ranks)
        settings = {**config_settings(rank_config), "ranks": ranks, "cores": setup.cores, "on_cores": ranks}

        def run(context: StepContext, ranks: int = ranks, rank_config: Config = rank_config) -> Json:
            with limit_cores(ranks):
                events = launch.train_ranks(rank_config, ranks, context.folder, context.seconds_left)
            return {"examples_per_s": launch.mean_speed(events)}

        seconds = 8 + rank_config.train.log_every * LOGS * BATCH / 25_000
        made.append(Step(name=f"{ranks} ranks", settings=settings, expected_seconds=seconds, run=run))
    settings = {**config_settings(config(setup, 1)), "cores": setup.cores, "nodes": list(NODES), "on_cores": 1}
    predictions = Step(
        name="predictions", settings=settings, expected_seconds=40, run=lambda context: _predict(setup, context)
    )
    return [*made, predictions]


def _predict(setup: Setup, context: StepContext) -> Json:
    """Predict the speed of ranks on this machine, one core each, and of several machines with a rank per core."""
    from thermocline.planner.calibrate import measure
    from thermocline.planner.cost_model import predict
    from thermocline.planner.workload import cluster_of, workload_of

    node = measure(context.folder, num_cores=1)  # one core, as each rank has
    one_rank = config(setup, 1)
    load = workload_of(one_rank)

    def rate(nodes: int, ranks: int) -> float:
        part = dataclasses.replace(node, cpu=dataclasses.replace(node.cpu, cores=ranks))
        cluster = cluster_of(one_rank, load, part, nodes=nodes, ranks=ranks)
        prediction: Any = predict(load, cluster, part).to_json()
        return float(prediction["examples_per_s"])

    here = [{"ranks": ranks, "examples_per_s": rate(1, ranks)} for ranks in rank_counts(setup.cores)]
    beyond = [
        {"ranks": nodes * setup.cores, "nodes": nodes, "examples_per_s": rate(nodes, setup.cores)} for nodes in NODES
    ]
    return {"cores": setup.cores, "here": here, "beyond": beyond}


# ---- section of the report


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    """Show measured and predicted speeds and speed-ups."""
    predictions = results["predictions"]
    counts = [point["ranks"] for point in predictions["here"] if f"{point['ranks']} ranks" in results]
    rates = [results[f"{count} ranks"]["examples_per_s"] for count in counts]
    here = {point["ranks"]: point["examples_per_s"] for point in predictions["here"]}
    beyond = [(point["ranks"], point["examples_per_s"], point["nodes"]) for point in predictions["beyond"]]
    predicted = [*here.items(), *((ranks, rate) for ranks, rate, _ in beyond)]
    rows: list[tuple[Any, ...]] = [
        (count, 1, rate, rate / rates[0], here[count], here[count] / here[counts[0]])
        for count, rate in zip(counts, rates, strict=True)
    ]
    rows += [(ranks, nodes, None, None, rate, rate / here[counts[0]]) for ranks, rate, nodes in beyond]
    return Section(
        text=[
            f"Every rank has one thread and {BATCH:,} examples per step ({KEYS:,} keys, {FIELDS} fields); the hash of "
            f"a key selects the rank of its row. Measured: as many of the {predictions['cores']} cores as ranks. "
            "Predicted: `thermocline plan` computes the speed from the measured costs of one core and of the links, "
            "for the same ranks and for more machines like this one. The network of the prediction is this machine's "
            "loopback."
        ],
        parts=[
            Figure(
                name="speed", title="Examples per second against ranks", x_label="ranks", y_label="examples/s",
                x_scale="log2", y_scale="log10",
                series=[
                    Series(name="this machine", x=counts, y=rates),
                    Series(name="plan", x=[x for x, _ in predicted], y=[y for _, y in predicted], kind="predicted"),
                ],
            ),
            Figure(
                name="speed-up", title="Speed-up over one rank", x_label="ranks", y_label="speed-up", x_scale="log2",
                y_scale="log2",
                series=[
                    Series(name="this machine", x=counts, y=[rate / rates[0] for rate in rates]),
                    Series(
                        name="plan", x=[x for x, _ in predicted], y=[y / here[counts[0]] for _, y in predicted],
                        kind="predicted",
                    ),
                ],
            ),
            Table(
                name="table", title="Speed and speed-up against ranks", rows=rows,
                columns=("ranks", "machines", "examples/s", "speed-up", "examples/s by plan", "speed-up by plan"),
                predicted=("examples/s by plan", "speed-up by plan"),
            ),
        ],
    )  # fmt: skip


EXPERIMENT = Experiment(title="Scalability over ranks, measured and predicted", steps=steps, section=section)
