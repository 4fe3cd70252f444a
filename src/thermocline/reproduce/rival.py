"""Models A to E against the MPI parameter server on the same machine's cores: speed-up, and speed-up at equal cost."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence

from thermocline.config import Config, Tiers, Train
from thermocline.data.presets import Plan
from thermocline.data.schema import Data, Synth
from thermocline.models.config import ModelConfig
from thermocline.reproduce import machine, models, mpi, paper
from thermocline.reproduce.experiment import (
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

SECONDS, LOGS, TRIAL = 60.0, 6, 12
"""Of each side in the full run; logs of a run, the first of which is not counted; steps of the trial before it."""
OURS = "thermocline"


def missing() -> str | None:
    """Why it cannot run here; none: it can."""
    return mpi.missing()


def ranks() -> list[int]:
    """One per core, and half as many."""
    cores = len(os.sched_getaffinity(0))
    return sorted({max(1, cores // 2), cores})


def names(setup: Setup) -> tuple[str, ...]:
    """Of the models; a short run has the smallest."""
    return models.NAMES if setup.effort >= 0.5 else models.NAMES[:1]


def config(setup: Setup, plan: Plan, *, tiers: bool) -> Config:
    """The same training for both; `tiers`: rows where the source's cluster had them, else all in memory."""
    whole = round(plan.keys * (plan.row_bytes + 80) * 1.1) + (64 << 20)
    places = Tiers(device="cpu", mem=whole)
    if tiers:
        store = models.store_memory(plan)
        places = Tiers(device=setup.device, hbm=plan.hbm, mem=plan.mem, ssd="rows", ssd_mem=store)
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
        tiers=places,
        train=Train(
            batch_size=models.batch_size(setup, plan), optimizer="rowwise_adagrad", lr=0.05, dense_optimizer="adam",
            dense_lr=1e-3, seed=setup.seed, steps=TRIAL, log_every=TRIAL // 2, checkpoint_minutes=None,
        ),
    )  # fmt: skip


def steps(setup: Setup) -> list[Step]:
    made = []
    seconds = max(1.0, SECONDS * setup.effort)
    for name in names(setup):
        plan = Plan.of(models.preset(setup, name))
        sides: list[int | str] = [OURS]
        if plan.keys * (plan.row_bytes + 80) * 1.1 < machine.memory_bytes() // 2:
            sides += ranks() if setup.effort >= 0.5 else ranks()[-1:]
        for side in sides:
            wanted = config(setup, plan, tiers=side == OURS)

            def run(work: Work, side: int | str = side, wanted: Config = wanted) -> Json:
                return _run(wanted, side, seconds, work)

            label = OURS if side == OURS else f"{side} ranks"
            settings = {**settings_of(wanted), "side": side, "seconds": seconds, "logs": LOGS}
            made.append(Step(name=f"{name}, {label}", settings=settings, seconds=2 * seconds + 6, run=run))
    return made


def _run(wanted: Config, side: int | str, seconds: float, work: Work) -> Json:
    """A short trial says how many steps fill the time; the figure is the next run's, without its first log."""
    trial = _rates(wanted, side, work)
    each = max(2, round(seconds * trial[-1] / wanted.train.batch_size / LOGS))
    train = dataclasses.replace(wanted.train, steps=each * LOGS, log_every=each)
    counted = _rates(dataclasses.replace(wanted, train=train), side, work)[1:]
    speed = len(counted) / sum(1 / rate for rate in counted)
    return {"examples_per_s": speed, "steps": each * LOGS, "cores": len(os.sched_getaffinity(0))}


def _rates(wanted: Config, side: int | str, work: Work) -> list[float]:
    """Examples/s of every log of a new run."""
    from thermocline.reproduce.training import watch

    for name in ("run", "rows", "rival"):
        shutil.rmtree(work.folder / name, ignore_errors=True)
    if side == OURS:
        tiers = dataclasses.replace(wanted.tiers, ssd=str(work.folder / "rows"))
        rows, _ = watch(dataclasses.replace(wanted, tiers=tiers), work)
    else:
        events = mpi.train(wanted, int(side), work.folder, work.left)
        rows = [event for event in events if event["event"] == "train"]
    return [float(row["examples_per_s"]) for row in rows]


# ---- what it shows


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What this machine is of the source's nodes: its rule, one GPU node is worth ten CPU nodes."""

    gpus: int
    cores: int

    @property
    def ours(self) -> float:
        """In CPU nodes: the GPUs' share of a GPU node; without one, the cores'."""
        node = paper.load()["nodes"]
        return self.gpus / node["gpus"] * float(node["cpu_nodes_per_gpu_node"]) if self.gpus else self.rival

    @property
    def rival(self) -> float:
        return self.cores / float(paper.load()["nodes"]["cores"])

    def words(self) -> str:
        if not self.gpus:
            return f"Both use the same {self.cores} cores: costs are equal, and so are the two speed-ups."
        node = paper.load()["nodes"]
        return (
            f"One GPU node of {node['gpus']} GPUs costs {node['cpu_nodes_per_gpu_node']} CPU nodes of {node['cores']} "
            f"cores. Here: {self.gpus} GPU = {self.gpus}/{node['gpus']} of a GPU node = {self.ours:g} CPU nodes; the "
            f"rival's {self.cores} cores = {self.rival:.3f} CPU nodes. Cost-normalised speed-up = speed-up x "
            f"{self.rival:.3f} / {self.ours:g} = speed-up x {self.rival / self.ours:.3f}."
        )


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    cost = Cost(gpus=int(setup.device == "cuda"), cores=max(int(result["cores"]) for result in results.values()))
    rates = {name: _of_model(name, results) for name in names(setup)}
    theirs = paper.load()["models"]
    rows = []
    for name, sides in rates.items():
        best = _best(sides)
        faster = None if best is None else sides[OURS] / sides[best]
        same_cost = None if faster is None else faster * cost.rival / cost.ours
        found = (sides[OURS], best, None if best is None else sides[best], faster, same_cost)
        rows.append((name, *found, theirs[name]["speedup"], theirs[name]["cost_normalised"]))
    shown = list(rates)
    return Section(
        text=[
            f"The source's models divided by {setup.scale:,.0f}; both sides train the same mini-batches from no rows "
            "at all, Thermocline through its tiers with the source's budgets, the rival (baselines/mpi_ps) with all "
            "rows in its ranks' memory. Models that do not fit this machine's memory have no rival.",
            cost.words(),
        ],
        parts=[
            Table(
                name="table",
                title="Speed-up over the MPI parameter server",
                columns=(
                    "model", "examples/s", "best number of ranks", "examples/s, MPI", "speed-up",
                    "speed-up at equal cost", "4 nodes' speed-up", "4 nodes' cost-normalised",
                ),
                rows=rows,
                paper=("4 nodes' speed-up", "4 nodes' cost-normalised"),
            ),
            Figure(
                name="speed", title="Examples per second", x="model", y="examples/s", form="bars", y_axis="log10",
                series=[
                    Series(name=OURS, x=shown, y=[rates[name][OURS] for name in shown]),
                    Series(name="the MPI rival", x=shown, y=[_rate(rates[name]) for name in shown]),
                ],
            ),
            Figure(
                name="speed-up", title="Speed-up over the MPI parameter server", x="model", y="times", form="bars",
                series=[
                    Series(name="here", x=shown, y=[row[4] for row in rows]),
                    Series(name="4 GPU nodes", x=shown, y=[row[6] for row in rows], kind="paper"),
                ],
            ),
        ],
    )  # fmt: skip


def _of_model(name: str, results: Mapping[str, Json]) -> dict[str, float]:
    """Side -> examples/s."""
    sides = {step.removeprefix(f"{name}, "): result for step, result in results.items() if step.startswith(f"{name}, ")}
    return {side: float(result["examples_per_s"]) for side, result in sides.items()}


def _best(sides: Mapping[str, float]) -> str | None:
    others: Sequence[str] = [side for side in sides if side != OURS]
    return max(others, key=lambda side: sides[side]) if others else None


def _rate(sides: Mapping[str, float]) -> float | None:
    best = _best(sides)
    return None if best is None else sides[best]


EXPERIMENT = Experiment(
    title="Against the MPI parameter server: speed-up and cost-normalised speed-up", steps=steps, section=section
)
