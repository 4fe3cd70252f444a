"""Models A to E against the MPI parameter server on the same machine's cores: speed-up, and speed-up at equal cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from experiments import models, models_report, mpi, paper
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
from thermocline.data.paper_models import PaperModel
from thermocline.utils.cpu_affinity import cores

SECONDS, GPU_SECONDS, EVERY = 30.0, 4.0, 4
"""Of the rival's training in the full run, per model and number of ranks; beside a GPU; mini-batches a log."""
OURS = ("memory", "tiers")
"""As models.py names its steps: everything in the top tier, which is how the rival works, or through the tiers."""
FASTER = 10.0
"""Times the rival's examples/s that are asked of a GPU where the model fits HBM."""


def missing() -> str | None:
    """Why it cannot run here; none: it can."""
    return mpi.missing()


def ranks(setup: Setup) -> list[int]:
    """One per core, and half as many."""
    return sorted({max(1, setup.cores // 2), setup.cores})


def names(setup: Setup) -> tuple[str, ...]:
    """Of the models; a short run has the smallest."""
    return models.NAMES if setup.effort >= 0.5 else models.NAMES[:1]


def config(setup: Setup, plan: PaperModel, count: int) -> Config:
    """The training of models.py, for so many ranks: each has its share of all rows in memory."""
    whole = plan.keys * (plan.row_bytes + 80) * 1.1
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
            dense_optimizer="adam", dense_lr=models.DENSE_LR, seed=setup.seed, log_every=EVERY,
            checkpoint_minutes=None,
        ),
    )  # fmt: skip


def steps(setup: Setup) -> list[Step]:
    """The models through the tiers and in the top one, which are steps of models.py, and the rival's."""
    ours = {step.name: step for step in models.steps(setup)}
    wanted_of_ours = [f"{name}, {side}" for name in names(setup) for side in OURS]
    made = [dataclasses.replace(ours[name], home="models") for name in wanted_of_ours if name in ours]
    for name in names(setup):
        plan = PaperModel.parse(models.preset(setup, name))
        if plan.keys * (plan.row_bytes + 80) * 1.1 > setup.dram // 2:
            continue
        for count in ranks(setup) if setup.effort >= 0.5 else ranks(setup)[-1:]:
            wanted = config(setup, plan, count)
            seconds = max(1.0, setup.seconds(SECONDS, GPU_SECONDS))

            def run(work: Work, count: int = count, wanted: Config = wanted, seconds: float = seconds) -> Json:
                return _run(wanted, count, seconds, work)

            settings = {**settings_of(wanted), "ranks": count, "seconds": seconds}
            made.append(Step(name=f"{name}, {count} ranks", settings=settings, seconds=seconds + 8, run=run))
    return made


def _run(wanted: Config, count: int, seconds: float, work: Work) -> Json:
    """From its first log after a third of the time to the last one in time: those after lack some ranks' examples."""
    events = mpi.train(wanted, count, work.folder, work.left, seconds=seconds)
    logs = [event for event in events if event["event"] == "train"]
    kept = [log for log in logs if seconds / 3 <= log["seconds"] <= seconds]
    first, last = (kept[0], kept[-1]) if len(kept) > 1 else (logs[0], logs[1])
    speed = (last["examples"] - first["examples"]) / (last["seconds"] - first["seconds"])
    return {"examples_per_s": speed, "steps": last["step"], "cores": cores()}


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
    cost = Cost(gpus=int(setup.device == "cuda"), cores=setup.cores)
    rates = {name: _of_model(name, results) for name in names(setup)}
    theirs = paper.load()["models"]
    rows = []
    for name, sides in rates.items():
        best, ours = _best(sides), _ours(name, results)
        faster = None if best is None else sides[ours] / sides[best]
        same_cost = None if faster is None else faster * cost.rival / cost.ours
        found = (sides["tiers"], sides.get("memory"), best, None if best is None else sides[best], faster, same_cost)
        rows.append((name, *found, theirs[name]["speedup"], theirs[name]["cost_normalised"]))
    shown, top = list(rates), models_report.top(setup)
    return Section(
        text=[
            f"The source's models divided by {setup.scale:,.0f}; both sides train the same mini-batches. Thermocline: "
            "the runs of the chapter on models A to E, through its tiers with the source's budgets and every row on "
            f"SSD at the beginning, and with everything in {top}. The rival (baselines/mpi_ps) has all rows in its "
            "ranks' memory, and none at the beginning. Speed-ups compare it with everything in "
            f"{top} where the source's budget of it holds the model, else with the tiers. Models that do not fit this "
            f"machine's memory have no rival.{_slower(rates, results)}",
            cost.words(),
        ],
        parts=[
            Table(
                name="table",
                title="Speed-up over the MPI parameter server",
                columns=(
                    "model", "examples/s, tiers", f"examples/s, all in {top}", "best number of ranks",
                    "examples/s, MPI", "speed-up",
                    "speed-up at equal cost", "4 nodes' speed-up", "4 nodes' cost-normalised",
                ),
                rows=rows,
                paper=("4 nodes' speed-up", "4 nodes' cost-normalised"),
            ),
            Figure(
                name="speed", title="Examples per second", x="model", y="examples/s", form="bars", y_axis="log10",
                series=[
                    Series(name="through the tiers", x=shown, y=[rates[name]["tiers"] for name in shown]),
                    Series(name=f"everything in {top}", x=shown, y=[rates[name].get("memory") for name in shown]),
                    Series(name="the MPI rival", x=shown, y=[_rate(rates[name]) for name in shown]),
                ],
            ),
            Figure(
                name="speed-up", title="Speed-up over the MPI parameter server", x="model", y="times", form="bars",
                series=[
                    Series(name="here", x=shown, y=[row[5] for row in rows]),
                    Series(name="4 GPU nodes", x=shown, y=[row[7] for row in rows], kind="paper"),
                ],
            ),
        ],
        claims=_claims(setup, results, rates),
    )  # fmt: skip


def _claims(setup: Setup, results: Mapping[str, Json], rates: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    """Of a GPU, where the model fits it."""
    claims = []
    for name, sides in rates.items():
        best = _best(sides)
        ours = _ours(name, results)
        if setup.device != "cuda" or best is None or ours == "tiers":
            continue
        faster = sides[ours] / sides[best]
        claims.append(
            Claim(
                text=f"model {name}, which fits HBM, is trained at {FASTER:g} or more times the examples/s of the MPI "
                f"rival on this machine's {setup.cores} cores",
                holds=faster >= FASTER,
                detail=f"{sides[ours]:,.0f} and {sides[best]:,.0f} ({best}): {faster:.1f} times",
            )
        )
    return claims


def _slower(rates: Mapping[str, Mapping[str, float]], results: Mapping[str, Json]) -> str:
    """Of models that are compared through the tiers."""
    found = {}
    for name, sides in rates.items():
        best = _best(sides)
        if best is not None and _ours(name, results) == "tiers" and sides["tiers"] < sides[best]:
            found[name] = sides["tiers"] / sides[best]
    if not found:
        return ""
    shares = ", ".join(f"{name} {share:.2f}" for name, share in found.items())
    return f" Slower than the rival, whose rows need no disk: {shares} of its examples/s."


def _of_model(name: str, results: Mapping[str, Json]) -> dict[str, float]:
    """Side -> examples/s."""
    sides = {step.removeprefix(f"{name}, "): result for step, result in results.items() if step.startswith(f"{name}, ")}
    return {side: float(result["examples_per_s"]) for side, result in sides.items()}


def _ours(name: str, results: Mapping[str, Json]) -> str:
    """The side that is compared: everything in the top tier, if the source's budget of HBM holds the model."""
    fits = f"{name}, memory" in results and models_report.fits_hbm(results[f"{name}, tiers"])
    return "memory" if fits else "tiers"


def _best(sides: Mapping[str, float]) -> str | None:
    others: Sequence[str] = [side for side in sides if side not in OURS]
    return max(others, key=lambda side: sides[side]) if others else None


def _rate(sides: Mapping[str, float]) -> float | None:
    best = _best(sides)
    return None if best is None else sides[best]


EXPERIMENT = Experiment(
    title="Against the MPI parameter server: speed-up and cost-normalised speed-up", steps=steps, section=section
)
