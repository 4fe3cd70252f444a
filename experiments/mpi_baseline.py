"""Models A to E against an MPI parameter server on the same machine: speed-up, and speed-up at equal cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from experiments import launch, models, models_report, paper
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
from thermocline.data.paper_models import PaperModel
from thermocline.utils.cpu_affinity import cores

SECONDS, GPU_SECONDS = 30.0, 4.0
"""Training time of the baseline in the full run, per model and number of ranks: without a GPU, and beside one."""
LOG_EVERY = 4
"""Mini-batches per log."""
SIDES = ("memory", "tiers")
"""Steps of models.py: everything in the top tier, as in the baseline, and through the tiers."""
REQUIRED_SPEED_UP = 10.0
"""Smallest speed-up that a claim demands of a GPU, for models that fit HBM."""


def ranks(setup: Setup) -> list[int]:
    """Return the numbers of ranks: one per core, and half of that."""
    return sorted({max(1, setup.cores // 2), setup.cores})


def names(setup: Setup) -> tuple[str, ...]:
    """Return the models; a short run has only the smallest."""
    return models.NAMES if setup.effort >= 0.5 else models.NAMES[:1]


def row_bytes(plan: PaperModel) -> float:
    """Return the memory of all rows with their index and metadata."""
    return plan.keys * (plan.row_bytes + 80) * 1.1


def config(setup: Setup, plan: PaperModel, count: int) -> Config:
    """Configure the training of models.py for `count` ranks that hold equal shares of all rows in memory."""
    whole = row_bytes(plan)
    return Config(
        data=Data(
            format="synth",
            synth=Synth(
                preset=models.preset(setup, plan.name), seed=setup.seed, examples=1 << 40, valid_examples=0,
                test_examples=0,
            ),
        ),
        model=ModelConfig(
            name="dnn", dim=plan.dim, hidden=plan.hidden, dropout=0.0, embedding_l2=0.0, initial=0.01, batch_norm=False
        ),
        tiers=Tiers(device="cpu", mem=round(whole / count * 1.1) + (64 << 20)),
        train=Train(
            batch_size=models.batch_size(setup, plan), optimizer="rowwise_adagrad", lr=models.OPTIMIZER.lr,
            dense_optimizer="adam", dense_lr=models.DENSE_LR, seed=setup.seed, log_every=LOG_EVERY,
            checkpoint_minutes=None,
        ),
    )  # fmt: skip


def steps(setup: Setup) -> list[Step]:
    """Return the steps of models.py for both sides, and those of the baseline."""
    shared = {step.name: step for step in models.steps(setup)}
    shared_names = [f"{name}, {side}" for name in names(setup) for side in SIDES]
    made = [dataclasses.replace(shared[name], owner="models") for name in shared_names if name in shared]
    for name in names(setup):
        plan = PaperModel.parse(models.preset(setup, name))
        if row_bytes(plan) > setup.dram // 2:
            continue
        for count in ranks(setup) if setup.effort >= 0.5 else ranks(setup)[-1:]:
            rank_config = config(setup, plan, count)
            seconds = max(1.0, setup.seconds(SECONDS, GPU_SECONDS))

            def run(
                context: StepContext, count: int = count, rank_config: Config = rank_config, seconds: float = seconds
            ) -> Json:
                return measure(rank_config, count, seconds, context)

            settings = {**config_settings(rank_config), "ranks": count, "seconds": seconds}
            made.append(Step(name=f"{name}, {count} ranks", settings=settings, expected_seconds=seconds + 8, run=run))
    return made


def measure(
    rank_config: Config,
    count: int,
    seconds: float,
    context: StepContext,
    *,
    skip: float | None = None,
    prepared: int = 0,
) -> Json:
    """Measure the speed from the first log after `skip` seconds to the last log in time.

    Later logs lack the examples of ranks that have already stopped.

    skip       seconds that are not measured; None: a third of the time
    prepared   batches that are generated before the training and repeated; every key then has a row before it
    """
    begin = seconds / 3 if skip is None else skip
    events = launch.train_mpi(
        rank_config, count, context.folder, context.seconds_left, seconds=seconds, prepared=prepared
    )
    logs = [event for event in events if event["event"] == "train"]
    in_time = [log for log in logs if begin <= log["seconds"] <= seconds]
    first, last = (in_time[0], in_time[-1]) if len(in_time) > 1 else (logs[0], logs[1])
    measured = last["seconds"] - first["seconds"]
    speed = (last["examples"] - first["examples"]) / measured
    return {"examples_per_s": speed, "steps": last["step"], "cores": cores(), "seconds": measured}


# ---- section of the report


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Cost of this machine in CPU nodes of Zhao et al. (2020), by its rule: one GPU node costs ten CPU nodes."""

    gpus: int
    cores: int

    @property
    def gpu_side(self) -> float:
        """CPU nodes of Thermocline: the GPUs' share of a GPU node, or the cores' share without a GPU."""
        node = paper.load()["nodes"]
        return self.gpus / node["gpus"] * float(node["cpu_nodes_per_gpu_node"]) if self.gpus else self.mpi_side

    @property
    def mpi_side(self) -> float:
        """CPU nodes of the baseline."""
        return self.cores / float(paper.load()["nodes"]["cores"])

    def explanation(self) -> str:
        """Return the arithmetic as text."""
        if not self.gpus:
            return f"Both sides use the same {self.cores} cores: costs are equal, and so are the two speed-ups."
        node = paper.load()["nodes"]
        return (
            f"The rule of Zhao (2026): one GPU node of {node['gpus']} GPUs costs {node['cpu_nodes_per_gpu_node']} CPU "
            f"nodes of {node['cores']} cores. Here {self.gpus} GPU = {self.gpus}/{node['gpus']} of a GPU node = "
            f"{self.gpu_side:g} CPU nodes, and the baseline's {self.cores} cores = {self.mpi_side:.3f} CPU nodes. "
            f"Cost-normalised speed-up = speed-up x {self.mpi_side:.3f} / {self.gpu_side:g} = "
            f"speed-up x {self.mpi_side / self.gpu_side:.3f}."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Speeds of one model, in examples/s."""

    tiers: float
    memory: float | None
    """Everything in the top tier; None if this machine cannot hold it."""
    mpi: float | None
    """The baseline with its best number of ranks; None if the model does not fit this machine's memory."""
    mpi_step: str | None
    """Name of that number of ranks."""
    compares_memory: bool
    """Whether `memory` is compared: the scaled HBM of the paper's cluster holds the model. Otherwise `tiers` is."""

    @property
    def compared(self) -> float:
        """Speed of Thermocline's side of the comparison."""
        return self.memory if self.compares_memory and self.memory is not None else self.tiers

    @property
    def speed_up(self) -> float | None:
        """Speed relative to the baseline."""
        return None if self.mpi is None else self.compared / self.mpi


def _compare(name: str, results: Mapping[str, Json]) -> Comparison:
    prefix = f"{name}, "
    speeds = {
        step.removeprefix(prefix): float(result["examples_per_s"])
        for step, result in results.items()
        if step.startswith(prefix)
    }
    best = max((side for side in speeds if side not in SIDES), key=lambda side: speeds[side], default=None)
    return Comparison(
        tiers=speeds["tiers"],
        memory=speeds.get("memory"),
        mpi=None if best is None else speeds[best],
        mpi_step=best,
        compares_memory="memory" in speeds and models_report.fits_hbm(results[f"{name}, tiers"]),
    )


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    """Show speeds and speed-ups by model."""
    cost = Cost(gpus=int(setup.device == "cuda"), cores=setup.cores)
    compared = {name: _compare(name, results) for name in names(setup)}
    published = paper.load()["models"]
    shown, top = list(compared), setup.top_tier
    rows = []
    for name, model in compared.items():
        same_cost = None if model.speed_up is None else model.speed_up * cost.mpi_side / cost.gpu_side
        measured = (model.tiers, model.memory, model.mpi_step, model.mpi, model.speed_up, same_cost)
        rows.append((name, *measured, published[name]["speedup"], published[name]["cost_normalised"]))
    return Section(
        text=[
            f"The models of Zhao et al. (2020) divided by {setup.scale:,.0f}; both sides train the same mini-batches. "
            "Thermocline's runs are those of the section on models A to E: through the tiers with their budgets and "
            f"every row on SSD at the start, and with everything in {top}. The MPI parameter server (baselines/mpi_ps) "
            "holds all rows in the memory of its ranks and starts without rows. Speed-ups compare it with everything "
            f"in {top} if the scaled budget holds the model, otherwise with the tiers. A model that does not fit "
            f"this machine's memory has no baseline.{_slower_text(compared)}",
            cost.explanation(),
        ],
        parts=[
            Table(
                name="table",
                title="Speed-up over the MPI parameter server",
                columns=(
                    "model", "examples/s, tiers", f"examples/s, all in {top}", "best number of ranks",
                    "examples/s, MPI", "speed-up",
                    "speed-up at equal cost", "speed-up of 4 nodes", "cost-normalised speed-up of 4 nodes",
                ),
                rows=rows,
                paper=("speed-up of 4 nodes", "cost-normalised speed-up of 4 nodes"),
            ),
            Figure(
                name="speed", title="Examples per second of both sides", x_label="model", y_label="examples/s",
                form="bars", y_scale="log10",
                series=[
                    Series(name="through the tiers", x=shown, y=[compared[name].tiers for name in shown]),
                    Series(name=f"everything in {top}", x=shown, y=[compared[name].memory for name in shown]),
                    Series(name="MPI parameter server", x=shown, y=[compared[name].mpi for name in shown]),
                ],
            ),
            Figure(
                name="speed-up", title="Speed-up by model, here and by Zhao (2026)", x_label="model",
                y_label="speed-up", form="bars",
                series=[
                    Series(name="this machine", x=shown, y=[compared[name].speed_up for name in shown]),
                    Series(
                        name="4 GPU nodes", x=shown, y=[published[name]["speedup"] for name in shown], kind="paper"
                    ),
                ],
                hlines={"target where HBM holds the model": REQUIRED_SPEED_UP} if setup.device == "cuda" else {},
            ),
        ],
        claims=_claims(setup, compared),
    )  # fmt: skip


def _claims(setup: Setup, compared: Mapping[str, Comparison]) -> list[Claim]:
    """Claim a speed-up for a GPU and the models that fit it."""
    published = paper.load()["models"]
    return [
        Claim(
            text=f"model {name}, which fits HBM, trains at {REQUIRED_SPEED_UP:g} or more times the examples/s of the "
            f"MPI parameter server on {setup.cores} cores",
            holds=model.speed_up >= REQUIRED_SPEED_UP,
            detail=f"{model.compared:,.0f} and {model.mpi:,.0f} ({model.mpi_step}): {model.speed_up:.1f} times",
            part="speed-up",
            ours=f"{model.speed_up:.1f} times",
            paper=f"{published[name]['speedup']} times: 4 GPU nodes, {published[name]['mpi_nodes']} CPU nodes",
        )
        for name, model in compared.items()
        if setup.device == "cuda" and model.compares_memory and model.speed_up is not None
    ]


def _slower_text(compared: Mapping[str, Comparison]) -> str:
    """Name the models that are compared through the tiers and are slower than the baseline."""
    slower = {
        name: model.speed_up
        for name, model in compared.items()
        if not model.compares_memory and model.speed_up is not None and model.speed_up < 1
    }
    if not slower:
        return ""
    shares = ", ".join(f"{name} {share:.2f}" for name, share in slower.items())
    return f" Slower than the baseline, whose rows need no disk: {shares} of its examples/s."


EXPERIMENT = Experiment(
    title="Against an MPI parameter server: speed-up and cost-normalised speed-up",
    steps=steps,
    section=section,
    missing=launch.mpi_missing,
)
