"""Tables, figures and claims about the measurements of models.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.experiment import Claim, Figure, Json, Section, Series, Setup, Table

MB = 1e6
STAGES = ("read", "collect", "pull", "load", "train")

BOUND = 0.8
"""Smallest share of the lower bound, HBM's or the disk's, that a claim demands of the tiers."""

Runs = Mapping[str, Json]


def fits_hbm(run: Json) -> bool:
    """Whether all rows fit into the scaled HBM of the cluster of Zhao et al. (2020)."""
    return bool(run["plan"]["keys"] * run["row_bytes"] <= run["plan"]["hbm"])


def section(setup: Setup, tiers: Runs, memory: Runs, disk: Json | None, commit_seconds: float) -> Section:
    """Show the runs through the tiers and the runs with everything in the top tier, both by model.

    disk             reads and bytes per second of the disk; None if they were not measured
    commit_seconds   interval of the store's commits
    """
    top = setup.top_tier
    possible = [
        *_bound_figure(tiers, memory, disk),
        _speed(tiers, memory, top),
        _disk_peak(tiers),
        _stages(tiers),
        _hits(tiers, "hbm", "HBM", "ids"),
        _hits(tiers, "mem", "DRAM", "requested rows"),
        _ssd(tiers, "bytes_read", "read for batches"),
        _ssd(tiers, "bytes_written", "written, merges included"),
        _pull(tiers),
    ]
    figures = [figure for figure in possible if any(any(series.y) for series in figure.series)]
    flat = [figure.title for figure in possible if figure not in figures]
    first = next(iter(tiers.values()))
    return Section(
        text=[
            f"The models of Zhao et al. (2020) with keys and bytes divided by {setup.scale:,.0f}. Nonzeros and dense "
            "layers are unchanged; the budgets of their cluster (1 TB of HBM, 4 TB of DRAM) have the same divisor. "
            "Every key has a row on SSD before the first batch, and all tiers above are empty. The store commits every "
            f"{commit_seconds:g} seconds, at least once. Speed is that of the second half.",
            f"The index and buffers of the SSD store are additional to the DRAM budget: {first['store_mem'] / MB:,.0f} "
            f"MB for model {next(iter(tiers))}. Everything in {top} is the same training with a budget that holds all "
            "rows, where the machine has that memory.",
            *([f"0 throughout, therefore without a figure: {'; '.join(flat)}."] if flat else []),
        ],
        parts=[*figures, _table(setup, tiers, memory, top), *_bounds(tiers, memory, disk)],
        claims=[_disk_claim(tiers), *_bound_claims(tiers, memory, disk)],
    )


def _second_half(run: Json) -> list[Json]:
    return run["points"][len(run["points"]) // 2 :]  # type: ignore[no-any-return]


def _per_batch(run: Json, counter: str) -> float:
    """Return the mean of a counter in the second half."""
    last = _second_half(run)
    return float(sum(point[counter] for point in last) / sum(point["batches"] for point in last))


def _allowed(run: Json, disk: Json) -> float | None:
    """Return the examples/s that the disk allows, by reads and by bytes; None if nothing is read."""
    by_reads = _per_batch(run, "reads") / disk["reads_per_s"]
    by_bytes = _per_batch(run, "bytes_read") / disk["bytes_per_s"]
    return run["batch_examples"] / max(by_reads, by_bytes) if by_reads else None


def _bounds(tiers: Runs, memory: Runs, disk: Json | None) -> list[Table]:
    """Compare the tiers with the bounds of HBM and disk, if the disk was measured."""
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
            title="Speed against the bounds of HBM and disk",
            columns=(
                "model", "fits HBM", "examples/s", "examples/s, all in HBM", "SSD reads per batch", "MB read per batch",
                "examples/s that the disk allows", "share of the lower bound",
            ),
            rows=rows,
            predicted=("examples/s that the disk allows", "share of the lower bound"),
            note=f"The idle disk gives {disk['reads_per_s']:,.0f} random reads of 4 KB per second and "
            f"{disk['bytes_per_s'] / MB:,.0f} MB/s in reads of 256 KB, measured without the page cache. The disk "
            "allows as many examples/s as follow from the longer of two times: of a batch's reads and of its bytes. "
            "One read of the store may cover many neighbouring pages. A share above 1 means that the disk was faster "
            "during the training than during its measurement.",
        )
    ]  # fmt: skip


def _bound_figure(tiers: Runs, memory: Runs, disk: Json | None) -> list[Figure]:
    """Draw measured speed and bounds of the models that are larger than HBM, if the disk was measured."""
    if disk is None:
        return []
    shown = [name for name, run in tiers.items() if not fits_hbm(run)]
    allowed = [_allowed(tiers[name], disk) for name in shown]
    whole = [memory[name]["examples_per_s"] if name in memory else None for name in shown]
    return [
        Figure(
            name="bound",
            title="Speed of models larger than HBM, and what bounds it",
            x_label="model",
            y_label="examples/s",
            form="bars",
            y_scale="log10",
            series=[
                Series(name="through the tiers", x=shown, y=[tiers[name]["examples_per_s"] for name in shown]),
                Series(name="the disk allows", x=shown, y=allowed, kind="predicted"),
                Series(name="everything in HBM", x=shown, y=whole),
            ],
        )
    ]


def _bound_claims(tiers: Runs, memory: Runs, disk: Json | None) -> list[Claim]:
    if disk is None:
        return []
    claims = []
    for name, run in tiers.items():
        if fits_hbm(run) or name not in memory:
            continue
        here, whole, by_disk = run["examples_per_s"], memory[name]["examples_per_s"], _allowed(run, disk)
        bound = whole if by_disk is None else min(whole, by_disk)
        disk_text = "nothing was read from SSD" if by_disk is None else (
            f"the disk allows {by_disk:,.0f}: {run['batch_examples']:,} examples per batch of "
            f"{_per_batch(run, 'reads'):,.0f} reads at {disk['reads_per_s']:,.0f}/s and "
            f"{_per_batch(run, 'bytes_read') / MB:,.0f} MB at {disk['bytes_per_s'] / MB:,.0f} MB/s"
        )  # fmt: skip
        claims.append(
            Claim(
                text=f"model {name}, larger than HBM, trains at {BOUND} or more of the bound of HBM and disk",
                holds=here >= BOUND * bound,
                detail=f"{here:,.0f} examples/s; everything in HBM {whole:,.0f}; {disk_text}; share {here / bound:.2f}",
                part="bound",
                ours=f"{here / bound:.2f} of the bound",
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
                _hit_rate(last, "hbm"), _hit_rate(last, "mem"),
                sum(point.get("bytes_read", 0) for point in last) / sum(point["batches"] for point in last) / MB,
                _peak(run),
            )
        )  # fmt: skip
    return Table(
        name="table",
        title=f"Models A to E divided by {setup.scale:,.0f}",
        columns=(
            "model", "nonzeros", "keys", "dense parameters", "MB of rows", "MB of HBM", "MB of DRAM",
            "examples per batch", "examples/s", f"examples/s, all in {top}", "share of that", "HBM hit rate",
            "DRAM hit rate", "SSD MB read per batch", "disk / rows",
        ),
        rows=rows,
        note="Hit rates and reads are those of the second half. disk / rows is the peak.",
    )  # fmt: skip


def _hit_rate(points: list[dict[str, float]], tier: str) -> float | None:
    requests = sum(point.get(f"{tier}_all", 0) for point in points)
    return sum(point[f"{tier}_hits"] for point in points) / requests if requests else None


def _peak(run: Json) -> float:
    """Return the peak of disk bytes over the bytes of all rows with their keys."""
    return float(max(point["disk_bytes"] for point in run["points"]) / (run["rows"] * (run["row_bytes"] + 8)))


def _speed(tiers: Runs, memory: Runs, top: str) -> Figure:
    return Figure(
        name="speed",
        title="Examples per second",
        x_label="model",
        y_label="examples/s",
        form="bars",
        y_scale="log10",
        series=[
            Series(name="through the tiers", x=list(tiers), y=[run["examples_per_s"] for run in tiers.values()]),
            Series(name=f"everything in {top}", x=list(memory), y=[run["examples_per_s"] for run in memory.values()]),
        ],
    )


def _stages(tiers: Runs) -> Figure:
    return Figure(
        name="stages",
        title="Busy time of each stage per batch",
        x_label="model",
        y_label="ms",
        form="stacked",
        series=[
            Series(name=stage, x=list(tiers), y=[run["stage_ms"].get(stage) for run in tiers.values()])
            for stage in STAGES
        ],
        note="Stages work concurrently on different batches: the slowest stage, not the sum, gives the time per batch.",
    )


def _hits(tiers: Runs, tier: str, name: str, requests: str) -> Figure:
    def rate(point: dict[str, float]) -> float | None:
        return point[f"{tier}_hits"] / point[f"{tier}_all"] if point.get(f"{tier}_all") else None

    return Figure(
        name=f"hits-{tier}",
        title=f"Hit rate of {name} over batches",
        x_label="batches",
        y_label=f"share of {requests}",
        series=_over_batches(tiers, lambda run, point: rate(point)),
    )


def _over_batches(tiers: Runs, value: Callable[[Json, Json], float | None]) -> list[Series]:
    """Return one line per model with `value(run, point)` of each point."""
    return [
        Series(name=name, x=[p["batch"] for p in run["points"]], y=[value(run, p) for p in run["points"]])
        for name, run in tiers.items()
    ]


def _ssd(tiers: Runs, field: str, what: str) -> Figure:
    return Figure(
        name=f"ssd-{field.replace('_', '-')}",
        title=f"SSD bytes per batch, {what}",
        x_label="batches",
        y_label="MB",
        y_scale="log10",
        series=_over_batches(tiers, lambda run, point: point[field] / point["batches"] / MB or None),
    )


def _pull(tiers: Runs) -> Figure:
    return Figure(
        name="pull",
        title="Time of the pull stage per batch (DRAM look-ups and SSD reads)",
        x_label="batches",
        y_label="ms",
        y_scale="log10",
        series=_over_batches(tiers, lambda run, point: point["pull_seconds"] / point["batches"] * 1000),
    )


def _disk_peak(tiers: Runs) -> Figure:
    return Figure(
        name="disk-peak",
        title="Peak disk space over the bytes of all rows",
        x_label="model",
        y_label="disk / rows",
        form="bars",
        series=[Series(name="peak", x=list(tiers), y=[_peak(run) for run in tiers.values()])],
        hlines={"bound": 2.0},
    )


def _disk_claim(tiers: Runs) -> Claim:
    peaks = {name: _peak(run) for name, run in tiers.items()}
    return Claim(
        text="disk space stays below twice the bytes of the rows",
        holds=max(peaks.values()) < 2,
        detail=", ".join(f"{name} {peak:.2f}" for name, peak in peaks.items()),
        part="disk-peak",
        ours=f"{max(peaks.values()):.2f} times",
    )
