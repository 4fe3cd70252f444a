"""Tables, figures and claims about the measurements of steady.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments import paper
from experiments.experiment import Claim, Figure, Json, Section, Series, Setup, Table
from experiments.steady_meter import SteadyMeter

MB = 1e6
SPEED_UP = {"A": 20.0, "B": 20.0, "C": 8.0, "D": 4.0, "E": 3.0}
"""Smallest speed-up over the MPI baseline on the same cores, by model."""
REQUIRED = ("C", "D", "E")
"""Models whose speed-up the full run asserts; the others are reported."""
BOUND = 0.8
"""Smallest share of the slower of all rows in HBM and the replayed reads."""
EXAMPLES_PER_S = {"E": 40_000.0}
KB_PER_EXAMPLE = {"E": 40.0}
"""Largest number of kilobytes read from SSD per example."""
SECONDS, CYCLE_HORIZONS = 60.0, 10
"""Least length of a measurement, and of the cycle of batches in horizons."""

Runs = Mapping[str, Json]


def section(setup: Setup, runs: Runs) -> Section:
    """Show the models that were measured."""
    top = setup.top_tier
    absent = [name for name in SPEED_UP if name not in runs]
    text = [
        f"The models of Zhao et al. (2020) with keys and bytes divided by {setup.scale:,.0f}; nonzeros and dense "
        "layers are unchanged, and the budgets of their cluster have the same divisor. One command measures one model, "
        "on one machine at a time. Every key has a row on SSD. As after a long training, the most popular rows are "
        "in HBM and the next ones in DRAM: they are placed there by the known frequencies of the generated keys, as "
        "many as the tiers hold, before the first batch. After the ramp-up, when the look-ahead has stopped growing, "
        f"{SECONDS:g} seconds or {SteadyMeter.HORIZONS} horizons are measured, whichever is longer.",
        f"All sides train the same batches, generated before the clock and repeated in a cycle. All in {top}: the "
        "same training with a budget that holds all rows. MPI: baselines/mpi_ps on the same cores with all rows in "
        "DRAM before the clock. Replay: the number of reads per batch of the steady state, at the same mean size, at "
        "random positions of the store's files, without processing. The cold start is a training of its own, with "
        "empty tiers above the store.",
        "The DRAM budget of all models is 40 % of the bytes of model E's rows; rows, their index, the look-ahead and "
        "buffers are inside, the index of the store is not. The look-ahead is off where HBM and DRAM hold all rows.",
    ]
    if absent:
        text.append(f"Not measured yet: {', '.join(absent)}.")
    return Section(
        text=text,
        parts=[
            _speeds(runs, top), _rows(runs), _method(runs), _speed_figure(runs, top), _speed_up_figure(runs),
            _curves("cold", "cold", "Examples per second from a cold start", runs),
            _curves("warm", "tiers", "Examples per second from placed rows", runs), _hits(runs), _stages(runs),
        ],
        claims=_claims(setup, runs),
    )  # fmt: skip


# ---- figures of one run


def rival(run: Json) -> tuple[str, float] | None:
    """Return the best number of ranks of the MPI baseline and its examples/s; None if it did not run."""
    best = max(run["rival"], key=lambda ranks: run["rival"][ranks]["examples_per_s"], default=None)
    return None if best is None else (best, float(run["rival"][best]["examples_per_s"]))


def compared(run: Json) -> float:
    """Return the examples/s that are compared with the baseline's: with all rows in HBM where the scaled HBM of the
    cluster of Zhao et al. (2020) holds the bytes of all rows (A and B), else through the tiers."""
    fits = run["plan"]["keys"] * run["tiers"]["memory"]["row_bytes"] <= run["plan"]["hbm"]
    side = run["memory"] if fits and run["memory"] else run["tiers"]
    return float(side["examples_per_s"])


def speed_up(run: Json) -> float | None:
    """Return our speed over the baseline's."""
    other = rival(run)
    return None if other is None else compared(run) / other[1]


def replay(run: Json) -> float | None:
    """Return the examples/s that the reads of the steady state alone allow; None: nothing was read."""
    steady, probe = run["tiers"]["steady"], run["disk"].get("replay")
    if probe is None or not steady.get("reads"):
        return None
    return float(steady["examples"] / steady["reads"] * probe["reads_per_s"])


def share_of_bound(run: Json) -> float | None:
    """Return the tiers' speed over the slower of all rows in the top tier and the replay."""
    bounds = [rate for rate in (run["memory"] and run["memory"]["examples_per_s"], replay(run)) if rate]
    return float(run["tiers"]["examples_per_s"]) / min(bounds) if bounds else None


def kb_per_example(run: Json) -> float:
    """Return the kilobytes read from SSD per example."""
    steady = run["tiers"]["steady"]
    return float(steady.get("bytes_read", 0) / steady["examples"] / 1000)


def memory_share(run: Json) -> float:
    """Return the bytes of rows, look-ahead and buffers that were in DRAM at most, over their budget."""
    memory = run["tiers"]["memory"]
    return float(memory["counted"] / memory["budget"])


def hit_rate(run: Json, tier: str) -> float | None:
    """Return the hit rate of "hbm" or "mem" in the steady state."""
    steady = run["tiers"]["steady"]
    asked = steady.get(f"{tier}_all", 0)
    return float(steady[f"{tier}_hits"] / asked) if asked else None


def _horizons(run: Json) -> float | None:
    tiers = run["tiers"]
    return tiers["steady"]["batches"] / tiers["horizon"] if tiers["horizon"] else None


# ---- parts


def _speeds(runs: Runs, top: str) -> Table:
    published = paper.load()["models"]
    rows = []
    for name, run in runs.items():
        other, bound = rival(run), replay(run)
        rows.append(
            (
                name, run["tiers"]["examples_per_s"], run["memory"] and run["memory"]["examples_per_s"],
                other and other[1], other and other[0], speed_up(run), SPEED_UP[name], bound, share_of_bound(run),
                published[name]["speedup"],
            )
        )  # fmt: skip
    return Table(
        name="table",
        title="Speed in the steady state",
        columns=(
            "model", "examples/s", f"examples/s, all in {top}", "examples/s, MPI", "ranks", "speed-up", "target",
            "examples/s, replay", "share of the lower bound", "speed-up of 4 nodes",
        ),
        rows=rows,
        paper=("speed-up of 4 nodes",),
        note=f"The lower bound is the slower of all in {top} and the replay of the reads. The speed-up of A and B, "
        f"whose rows fit the HBM of the cluster, is that of all in {top}.",
    )  # fmt: skip


def _rows(runs: Runs) -> Table:
    rows = []
    for name, run in runs.items():
        plan, memory, tiers = run["plan"], run["tiers"]["memory"], run["tiers"]
        rows.append(
            (
                name, plan["keys"], plan["keys"] * memory["row_bytes"] / MB,
                memory["hbm_budget"] / MB if memory["hbm_budget"] else None, memory["budget"] / MB,
                tiers["hbm_placed"], tiers["dram_placed"], hit_rate(run, "hbm"), hit_rate(run, "mem"),
                kb_per_example(run), memory_share(run),
                memory["process_grew"] / (memory["budget"] + memory["store_budget"]),
            )
        )  # fmt: skip
    return Table(
        name="rows",
        title="Rows, hit rates and memory in the steady state",
        columns=(
            "model", "keys", "MB of rows", "MB of HBM", "MB of DRAM", "rows placed in HBM", "rows placed in DRAM",
            "HBM hit rate", "DRAM hit rate", "SSD KB read per example", "DRAM in use / budget", "process / budgets",
        ),
        rows=rows,
        note="HBM's hit rate is per id. DRAM's is per row that HBM lacks; a row that was loaded ahead from SSD is a "
        "miss. DRAM in use has rows, index, buffers and the batches in flight, at most. Process: its growth over the "
        "budgets of DRAM and of the store's index.",
    )  # fmt: skip


def _method(runs: Runs) -> Table:
    rows = []
    for name, run in runs.items():
        tiers, horizon = run["tiers"], run["tiers"]["horizon"]
        rows.append(
            (
                name, run["batch_examples"], run["cycle"], horizon, run["cycle"] / horizon if horizon else None,
                tiers["ramp_seconds"], tiers["steady"]["seconds"], _horizons(run), sum(run["seconds"].values()),
            )
        )  # fmt: skip
    return Table(
        name="method",
        title="Lengths of the measurements",
        columns=(
            "model", "examples per batch", "batches of the cycle", "batches ahead", "cycle / horizon",
            "seconds of ramp-up", "seconds measured", "horizons measured", "seconds of the stretch",
        ),
        rows=rows,
    )  # fmt: skip


def _speed_figure(runs: Runs, top: str) -> Figure:
    names = list(runs)
    others = [rival(run) for run in runs.values()]
    return Figure(
        name="speed", title="Examples per second in the steady state", x_label="model", y_label="examples/s",
        form="bars", y_scale="log10",
        series=[
            Series(name="through the tiers", x=names, y=[run["tiers"]["examples_per_s"] for run in runs.values()]),
            Series(
                name=f"everything in {top}", x=names,
                y=[run["memory"] and run["memory"]["examples_per_s"] for run in runs.values()],
            ),
            Series(name="replay of the reads", x=names, y=[replay(run) for run in runs.values()]),
            Series(name="MPI parameter server", x=names, y=[other and other[1] for other in others]),
        ],
    )  # fmt: skip


def _speed_up_figure(runs: Runs) -> Figure:
    names, published = list(runs), paper.load()["models"]
    return Figure(
        name="speed-up", title="Speed-up over the MPI parameter server", x_label="model", y_label="speed-up",
        form="bars",
        series=[
            Series(name="this machine", x=names, y=[speed_up(run) for run in runs.values()]),
            Series(name="4 GPU nodes", x=names, y=[published[name]["speedup"] for name in names], kind="paper"),
        ],
    )  # fmt: skip


def _curves(name: str, part: str, title: str, runs: Runs) -> Figure:
    def points(run: Json) -> list[Json]:
        return [point for point in run[part]["curve"] if point["seconds"] > 0]

    return Figure(
        name=name, title=title, x_label="seconds", y_label="examples/s", y_scale="log10",
        series=[
            Series(
                name=model, x=[point["at"] for point in points(run)],
                y=[point["examples"] / point["seconds"] or None for point in points(run)],
            )
            for model, run in runs.items()
        ],
    )  # fmt: skip


def _hits(runs: Runs) -> Figure:
    series = []
    for name, run in runs.items():
        points = _by_horizon(run)
        rates = [point["mem_hits"] / point["mem_all"] if point["mem_all"] > 0 else None for point in points]
        series.append(Series(name=name, x=[point["at"] for point in points], y=rates))
    return Figure(
        name="hits", title="Hit rate of DRAM from placed rows", x_label="seconds", y_label="share of requested rows",
        series=series,
        note="Each point is the mean over a horizon or more: rows are loaded for a whole horizon at once, before HBM "
        "asks for them.",
    )  # fmt: skip


def _by_horizon(run: Json) -> list[Json]:
    """Return the points of the curve after the ramp-up, joined until each has a horizon of batches."""
    joined: list[Json] = []
    tiers = run["tiers"]
    for point in tiers["curve"]:
        if point["at"] <= tiers["ramp_seconds"]:
            continue
        if joined and joined[-1]["batches"] < tiers["horizon"]:
            last = joined[-1]
            joined[-1] = {name: last[name] + point[name] for name in point} | {"at": point["at"]}
        else:
            joined.append(point)
    return joined


def _stages(runs: Runs) -> Figure:
    stages = list(dict.fromkeys(stage for run in runs.values() for stage in run["tiers"]["stage_ms"]))
    return Figure(
        name="stages", title="Busy time of each stage per batch in the steady state", x_label="model", y_label="ms",
        form="stacked",
        series=[
            Series(name=stage, x=list(runs), y=[run["tiers"]["stage_ms"].get(stage) for run in runs.values()])
            for stage in stages
        ],
        note="Stages work concurrently on different batches: the slowest stage, not the sum, gives the time per batch.",
    )  # fmt: skip


# ---- claims


def _claims(setup: Setup, runs: Runs) -> list[Claim]:
    """Claim the targets for a GPU, and the lengths of the measurements everywhere."""
    made = [_length_claim(name, run) for name, run in runs.items()]
    made += [
        _claim(
            f"model {name}: rows, look-ahead and buffers stay inside the budget of DRAM", memory_share(run), 1.0,
            "rows", f"{run['tiers']['memory']['counted'] / MB:,.0f} of {run['tiers']['memory']['budget'] / MB:,.0f} MB",
            at_most=True,
        )
        for name, run in runs.items()
    ]  # fmt: skip
    if setup.device != "cuda":
        return made
    for name, run in runs.items():
        here, times, other = run["tiers"]["examples_per_s"], speed_up(run), rival(run)
        if times is not None and other is not None:
            text = f"model {name} trains at {SPEED_UP[name]:g} or more times the speed of the MPI parameter server"
            detail = f"{compared(run):,.0f} and {other[1]:,.0f} examples/s ({other[0]} ranks): {times:.1f} times"
            made.append(_claim(text, times, SPEED_UP[name], "table", detail, asserted=name in REQUIRED))
        share = share_of_bound(run)
        if name in REQUIRED and share is not None:
            text = f"model {name} trains at {BOUND} or more of the slower of HBM and the replayed reads"
            bounds = f"all in HBM {run['memory']['examples_per_s']:,.0f}, " if run["memory"] else ""
            detail = f"{here:,.0f} examples/s; {bounds}replay {replay(run) or 0:,.0f}: {share:.2f}"
            made.append(_claim(text, share, BOUND, "table", detail))
        if name in EXAMPLES_PER_S:
            text = f"model {name} trains {EXAMPLES_PER_S[name]:,.0f} or more examples/s"
            made.append(_claim(text, here, EXAMPLES_PER_S[name], "table", f"{here:,.0f}"))
        if name in KB_PER_EXAMPLE:
            text = f"model {name} reads {KB_PER_EXAMPLE[name]:g} KB or less from SSD per example"
            read = kb_per_example(run)
            made.append(_claim(text, read, KB_PER_EXAMPLE[name], "rows", f"{read:.1f} KB", at_most=True))
    return made


def _claim(text: str, value: float, target: float, part: str, detail: str, **options: Any) -> Claim:
    at_most = options.pop("at_most", False)
    holds = value <= target if at_most else value >= target
    return Claim(text=text, holds=holds, detail=detail, part=part, **options)


def _length_claim(name: str, run: Json) -> Claim:
    """Claim that the measurement and the cycle of batches are long enough."""
    tiers, horizon = run["tiers"], run["tiers"]["horizon"]
    seconds, horizons = tiers["steady"]["seconds"], _horizons(run)
    long_enough = seconds >= SECONDS and (horizons is None or horizons >= SteadyMeter.HORIZONS)
    return Claim(
        text=f"model {name}: {SECONDS:g} s and {SteadyMeter.HORIZONS} horizons are measured, on a cycle of "
        f"{CYCLE_HORIZONS} horizons or, without a look-ahead, 1,000 batches",
        holds=long_enough and run["cycle"] >= (CYCLE_HORIZONS * horizon if horizon else 1000),
        detail=f"{seconds:.0f} s, {horizons or 0:.1f} horizons of {horizon} batches, a cycle of {run['cycle']}",
        part="method",
    )
