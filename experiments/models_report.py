"""What models.py measured, as tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.experiment import Claim, Figure, Json, Section, Series, Setup, Table

MB = 1e6
STAGES = ("read", "collect", "pull", "load", "train")

BOUND = 0.8
"""What is asked of the tiers, as a share of the slower of HBM and disk."""

Runs = Mapping[str, Json]


def fits_hbm(run: Json) -> bool:
    """Whether all rows fit the model's share of the source's HBM."""
    return bool(run["plan"]["keys"] * run["row_bytes"] <= run["plan"]["hbm"])


def top(setup: Setup) -> str:
    """The tier where rows are trained."""
    return "HBM" if setup.device == "cuda" else "DRAM"


def section(setup: Setup, tiers: Runs, memory: Runs, disk: Json | None, every: float) -> Section:
    """Of the runs through the tiers, and of those with everything in the top one, by model.

    disk    reads and bytes that it gives in a second; none: not measured
    every   so many seconds the store commits
    """
    figures = [_speed(tiers, memory, top(setup)), _stages(tiers)]
    if setup.device == "cuda":
        figures.append(_hits(tiers, "hbm", "HBM", "ids"))
    below = "It begins empty, and gets what HBM evicts: 0 until then." if setup.device == "cuda" else ""
    figures += [
        _hits(tiers, "mem", "DRAM", "rows that were asked of it", below),
        *(_ssd(n, r) for n, r in tiers.items()),
    ]
    figures += [_pull(tiers), _disk(tiers), _disk_share(tiers)]
    first = next(iter(tiers.values()))
    return Section(
        text=[
            f"The source's models with keys and bytes divided by {setup.scale:,.0f}, nonzeros and dense layers as they "
            "are, and the budgets of its cluster (1 TB of HBM, 4 TB of DRAM) divided alike. Every key has a row on SSD "
            f"before the first batch, and all tiers above are empty. The store commits every {every:g} seconds, or "
            "once; speed is that of the second half.",
            f"The index and buffers of the SSD store are beside the DRAM budget: {first['store_mem'] / MB:,.0f} MB for "
            f"model {next(iter(tiers))}. Everything in {top(setup)} is the same training with a budget that holds all "
            "rows, where this machine has it.",
        ],
        parts=[_table(setup, tiers, memory, top(setup)), *_bounds(tiers, memory, disk), *figures],
        claims=[_disk_claim(tiers), *_bound_claims(tiers, memory, disk)],
    )


def _second_half(run: Json) -> list[Json]:
    return run["points"][len(run["points"]) // 2 :]  # type: ignore[no-any-return]


def _per_batch(run: Json, what: str) -> float:
    """In the second half."""
    last = _second_half(run)
    return float(sum(point[what] for point in last) / sum(point["batches"] for point in last))


def _allowed(run: Json, disk: Json) -> float | None:
    """Examples/s that the disk allows, by reads and by bytes; none: nothing is read."""
    by_reads = _per_batch(run, "reads") / disk["reads_per_s"]
    by_bytes = _per_batch(run, "bytes_read") / disk["bytes_per_s"]
    return run["batch_examples"] / max(by_reads, by_bytes) if by_reads else None


def _bounds(tiers: Runs, memory: Runs, disk: Json | None) -> list[Table]:
    """What HBM and the disk allow, where the disk's rate is known."""
    if disk is None:
        return []
    rows = []
    for name, run in tiers.items():
        whole, by_disk, here = memory.get(name), _allowed(run, disk), run["examples_per_s"]
        bounds = [rate for rate in (whole and whole["examples_per_s"], by_disk) if rate]
        rows.append(
            (
                name, "yes" if fits_hbm(run) else "no", here, whole and whole["examples_per_s"],
                _per_batch(run, "reads"), _per_batch(run, "bytes_read") / MB, by_disk,
                here / min(bounds) if bounds else None,
            )
        )  # fmt: skip
    return [
        Table(
            name="bounds",
            title="Against what HBM and the disk allow",
            columns=(
                "model", "fits HBM", "examples/s", "examples/s, all in HBM", "SSD reads a batch", "MB read a batch",
                "examples/s that the disk allows", "share of the smaller",
            ),
            rows=rows,
            predicted=("examples/s that the disk allows", "share of the smaller"),
            note=f"This disk answers {disk['reads_per_s']:,.0f} random reads of 4 KB a second, and gives "
            f"{disk['bytes_per_s'] / MB:,.0f} MB a second in reads of 256 KB, measured past the page cache with "
            "nothing else going on. Examples/s that it allows: examples a batch over the longer of the two times that "
            "a batch's reads and its bytes would take. A read of the store may be of many neighbouring pages. "
            "Above 1: the disk did better while it was trained on than when it was measured.",
        )
    ]  # fmt: skip


def _bound_claims(tiers: Runs, memory: Runs, disk: Json | None) -> list[Claim]:
    if disk is None:
        return []
    claims = []
    for name, run in tiers.items():
        if fits_hbm(run) or name not in memory:
            continue
        here, whole, by_disk = run["examples_per_s"], memory[name]["examples_per_s"], _allowed(run, disk)
        bound = whole if by_disk is None else min(whole, by_disk)
        words = "nothing was read from SSD" if by_disk is None else (
            f"the disk allows {by_disk:,.0f}: {run['batch_examples']:,} examples a batch of "
            f"{_per_batch(run, 'reads'):,.0f} reads at {disk['reads_per_s']:,.0f}/s and "
            f"{_per_batch(run, 'bytes_read') / MB:,.0f} MB at {disk['bytes_per_s'] / MB:,.0f} MB/s"
        )  # fmt: skip
        claims.append(
            Claim(
                text=f"model {name}, larger than HBM, is trained at {BOUND} or more of what HBM and the disk allow",
                holds=here >= BOUND * bound,
                detail=f"{here:,.0f} examples/s; everything in HBM {whole:,.0f}; {words}; share {here / bound:.2f}",
            )
        )
    return claims


def _table(setup: Setup, tiers: Runs, memory: Runs, top: str) -> Table:
    rows = []
    for name, run in tiers.items():
        plan, last = run["plan"], _second_half(run)
        whole = memory.get(name)
        rows.append(
            (
                name, plan["nonzeros"], plan["keys"], plan["dense_parameters"], plan["keys"] * run["row_bytes"] / MB,
                run["hbm_budget"] / MB if run["hbm_budget"] else None, run["mem_budget"] / MB, run["batch_examples"],
                run["examples_per_s"], None if whole is None else whole["examples_per_s"],
                None if whole is None else run["examples_per_s"] / whole["examples_per_s"],
                _rate(last, "hbm"), _rate(last, "mem"),
                sum(point.get("bytes_read", 0) for point in last) / sum(point["batches"] for point in last) / MB,
                _peak(run),
            )
        )  # fmt: skip
    return Table(
        name="table",
        title=f"Models A to E divided by {setup.scale:,.0f}",
        columns=(
            "model", "nonzeros", "keys", "dense parameters", "MB of rows", "MB of HBM", "MB of DRAM",
            "examples a batch", "examples/s", f"examples/s, all in {top}", "share of that", "HBM hit rate",
            "DRAM hit rate", "SSD MB read a batch", "disk / rows",
        ),
        rows=rows,
        note="Hit rates and reads are those of the second half.",
    )  # fmt: skip


def _rate(points: list[dict[str, float]], tier: str) -> float | None:
    asked = sum(point.get(f"{tier}_all", 0) for point in points)
    return sum(point[f"{tier}_hits"] for point in points) / asked if asked else None


def _peak(run: Json) -> float:
    """The most disk that was ever used, by the bytes of all rows with their keys."""
    return float(max(point["disk_bytes"] for point in run["points"]) / (run["rows"] * (run["row_bytes"] + 8)))


def _speed(tiers: Runs, memory: Runs, top: str) -> Figure:
    return Figure(
        name="speed",
        title="Examples per second",
        x="model",
        y="examples/s",
        form="bars",
        series=[
            Series(name="through the tiers", x=list(tiers), y=[run["examples_per_s"] for run in tiers.values()]),
            Series(name=f"everything in {top}", x=list(memory), y=[run["examples_per_s"] for run in memory.values()]),
        ],
    )


def _stages(tiers: Runs) -> Figure:
    return Figure(
        name="stages",
        title="Where the time goes: work of each stage, per batch",
        x="model",
        y="ms",
        form="stacked",
        series=[
            Series(name=stage, x=list(tiers), y=[run["stage_ms"].get(stage) for run in tiers.values()])
            for stage in STAGES
        ],
        note="Stages work at the same time, on different batches: a batch takes as long as the slowest, not the sum.",
    )


def _hits(tiers: Runs, tier: str, name: str, what: str, note: str = "") -> Figure:
    def rate(point: dict[str, float]) -> float | None:
        return point[f"{tier}_hits"] / point[f"{tier}_all"] if point.get(f"{tier}_all") else None

    return Figure(
        name=f"hits-{tier}",
        title=f"Hit rate of {name} over batches",
        x="batches",
        y=f"share of {what}",
        series=_over_batches(tiers, lambda run, point: rate(point)),
        note=note,
    )


def _over_batches(tiers: Runs, value: Callable[[Json, Json], float | None]) -> list[Series]:
    """One line per model: `value` of the run and each of its points."""
    return [
        Series(name=name, x=[p["batch"] for p in run["points"]], y=[value(run, p) for p in run["points"]])
        for name, run in tiers.items()
    ]


def _ssd(name: str, run: Json) -> Figure:
    points = run["points"]
    places = [point["batch"] for point in points]

    def per_batch(field: str) -> list[float]:
        return [point[field] / point["batches"] / MB for point in points]

    return Figure(
        name=f"ssd-{name.lower()}",
        title=f"Model {name}: SSD bytes per batch",
        x="batches",
        y="MB",
        series=[
            Series(name="read for batches", x=places, y=per_batch("bytes_read")),
            Series(name="written, merging included", x=places, y=per_batch("bytes_written")),
            Series(name="read and written by merging", x=places, y=per_batch("merged")),
        ],
        marks=[point["batch"] for point in points if point["merges"]],
        marked="a merge ended",
    )


def _pull(tiers: Runs) -> Figure:
    return Figure(
        name="pull",
        title="Time of the pull stage per batch: DRAM look-ups and SSD reads",
        x="batches",
        y="ms",
        series=_over_batches(tiers, lambda run, point: point["pull_seconds"] / point["batches"] * 1000),
    )


def _disk(tiers: Runs) -> Figure:
    return Figure(
        name="disk",
        title="Disk used, by the bytes of all rows",
        x="batches",
        y="disk / rows",
        series=_over_batches(tiers, lambda run, point: point["disk_bytes"] / (run["rows"] * (run["row_bytes"] + 8))),
        levels={"the bound": 2.0},
    )


def _disk_share(tiers: Runs) -> Figure:
    return Figure(
        name="disk-peak",
        title="The most disk ever used, by the bytes of all rows",
        x="model",
        y="disk / rows",
        form="bars",
        series=[Series(name="peak", x=list(tiers), y=[_peak(run) for run in tiers.values()])],
        levels={"the bound": 2.0},
    )


def _disk_claim(tiers: Runs) -> Claim:
    peaks = {name: _peak(run) for name, run in tiers.items()}
    return Claim(
        text="disk stays under twice the rows",
        holds=max(peaks.values()) < 2,
        detail=", ".join(f"{name} {peak:.2f}" for name, peak in peaks.items()),
    )
