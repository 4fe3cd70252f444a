"""Data types of a run: an experiment consists of steps; their results become tables, figures and claims."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from experiments import launch, machine
from thermocline.config.loader import flatten
from thermocline.config.schema import Config
from thermocline.errors import ConfigError
from thermocline.utils.cpu_affinity import cores
from thermocline.utils.machine import memory_bytes

Json = Any
Cell = str | float | int | None
Kind = Literal["measured", "predicted", "paper"]
AxisScale = Literal["linear", "log2", "log10"]

PRINTED = "Zhao 2026"
"""Citation of the document whose numbers are in paper.json."""
MARKS = {"paper": f" ({PRINTED})", "predicted": " (predicted)", "measured": ""}
"""Suffixes of names whose numbers are not measured."""

STEP_SECONDS = 480.0
"""Longest uninterrupted run of a step; a longer step saves its state and continues in the next call."""

FULL_SCALE, QUICK_SCALE, QUICK_EFFORT = "1/1000", "1/100000", 0.1

TOO_SMALL = (
    "This run is too small to judge the paper's claims. The full run, without --quick and --effort, checks them."
)
"""Note beside the claims of a run whose setup does not judge them."""


def parse_scale(text: str) -> float:
    """Return the divisor of a scale such as "1/1000"."""
    match = re.fullmatch(r"\s*1\s*/\s*([0-9][0-9.eE+_]*)\s*", text)
    try:
        divisor = float(match[1]) if match else math.nan
    except ValueError:
        divisor = math.nan
    if not 1 <= divisor < math.inf:
        raise ConfigError(f'--scale is "{text}": write it as 1/N with N at least 1, such as 1/1000')
    return divisor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Size of a run, and the machine properties that its steps depend on."""

    scale: float = 1000.0
    """Divisor of the paper's model sizes."""
    effort: float = 1.0
    """Share of the full run's training, above 0 and at most 1."""
    seed: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    judges_claims: bool = True
    """True for the full run only: a claim that does not hold is then an error."""
    memory: int = 8 << 30
    """Bytes of the top tier that an experiment may fill."""
    cores: int = dataclasses.field(default_factory=cores)
    dram: int = dataclasses.field(default_factory=memory_bytes)
    """Bytes of main memory."""
    lookahead: str = "auto"
    """Setting of the look-ahead from SSD where an experiment measures it: "auto", a number of batches, or a size."""
    mpi: bool = dataclasses.field(default_factory=lambda: launch.mpi_missing() is None)
    """Whether the MPI baseline can run."""

    @classmethod
    def from_options(
        cls, *, quick: bool, scale: str | None, effort: float | None, seed: int, device: str, lookahead: str = "auto"
    ) -> Self:
        """Build the setup of the command line's options for this machine; None selects the full or quick default."""
        if device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f'--device is "{device}": choose auto, cpu or cuda')
        gpu = machine.gpu_bytes()
        if device == "cuda" and not gpu:
            raise ConfigError('--device is "cuda", but torch finds no GPU: choose auto or cpu')
        on_gpu = device != "cpu" and gpu > 0
        share = (QUICK_EFFORT if quick else 1.0) if effort is None else effort
        if not 0 < share <= 1:
            raise ConfigError(f"--effort is {share}: it must be above 0 and at most 1, the full run")
        return cls(
            scale=parse_scale(scale or (QUICK_SCALE if quick else FULL_SCALE)),
            effort=share,
            seed=seed,
            device="cuda" if on_gpu else "cpu",
            lookahead=lookahead,
            judges_claims=not quick and share == 1,
            memory=min(memory_bytes() // 2, gpu * 6 // 10 if on_gpu else 1 << 62),
        )

    def record(self) -> dict[str, Json]:
        """Return the fields for a file of results; the default look-ahead is left out, as in files before it."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if (name, value) != ("lookahead", "auto")}

    @property
    def top_tier(self) -> str:
        """Name of the tier in which rows are trained."""
        return "HBM" if self.device == "cuda" else "DRAM"

    def same_request(self, other: Setup) -> bool:
        """Compare the requested sizes, ignoring the machine."""
        return (self.scale, self.effort, self.seed) == (other.scale, other.effort, other.seed)

    def seconds(self, cpu: float, gpu: float) -> float:
        """Scale the full run's training time on a CPU or on a GPU by the effort."""
        return self.effort * (gpu if self.device == "cuda" else cpu)

    def count(self, full: int, least: int = 1) -> int:
        """Scale a count of the full run by the effort, with a lower bound."""
        return max(least, round(full * self.effort))


class StepContext:
    """Arguments of a step's function: a folder that exists until the step is done, a time limit, a progress report."""

    def __init__(
        self, folder: Path, limit: float = STEP_SECONDS, on_progress: Callable[[float], None] | None = None
    ) -> None:
        self.folder = folder
        self._end = time.monotonic() + limit
        self._on_progress = on_progress or (lambda share: None)

    @property
    def seconds_left(self) -> float:
        """Seconds until the limit. Below 0, the step must save its state and return None."""
        return self._end - time.monotonic()

    def report_progress(self, share: float) -> None:
        """Report the finished share of the step, 0 to 1."""
        self._on_progress(share)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The smallest piece of work whose result is cached."""

    name: str
    """Unique within its experiment."""
    settings: Mapping[str, Json]
    """Everything that the result depends on except the program: the cache key."""
    expected_seconds: float
    """Estimate for two cores, used by the progress bar only."""
    run: Callable[[StepContext], Json | None]
    """Returns the result as JSON, or None when its time is over: the next call continues from the step's folder."""
    owner: str | None = None
    """Experiment that caches the result, if another one than the user of this step; the step then runs once."""


def config_settings(config: Config) -> dict[str, Json]:
    """Return the settings of a step that trains a config."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flatten(config.resolve())}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows for the page, a CSV file and a JSON file."""

    name: str
    """Part of the file names."""
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    paper: Sequence[str] = ()
    """Columns with the paper's numbers."""
    predicted: Sequence[str] = ()
    """Columns with computed, not measured numbers."""
    note: str = ""

    def kind(self, column: str) -> Kind:
        """Return the origin of a column's numbers."""
        return "paper" if column in self.paper else "predicted" if column in self.predicted else "measured"

    @property
    def kinds(self) -> list[Kind]:
        """Origins of all columns."""
        return [self.kind(column) for column in self.columns]

    @property
    def headings(self) -> list[str]:
        """Column names, marked where the numbers are not measured."""
        return [column + MARKS[self.kind(column)] for column in self.columns]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, or the bars of one colour."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float | None]
    kind: Kind = "measured"

    @property
    def label(self) -> str:
        """Name in the legend, marked where the numbers are not measured."""
        return self.name + MARKS[self.kind]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot. Bars have text as x values, lines have numbers."""

    name: str
    """Part of the file names."""
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    form: Literal["lines", "bars", "stacked"] = "lines"
    x_scale: AxisScale = "linear"
    y_scale: AxisScale = "linear"
    vlines: Sequence[float] = ()
    """x values of vertical lines."""
    vlines_label: str = ""
    hlines: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Names and y values of horizontal lines."""
    y_from: float | None = None
    """Start of a linear y axis; points below it are not drawn. None: the smallest value."""
    note: str = ""

    @property
    def kinds(self) -> list[Kind]:
        """Origins of all series."""
        return [series.kind for series in self.series]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement of the paper, or a bound of this system, and whether the results confirm it."""

    text: str
    holds: bool
    detail: str
    """The numbers that decide."""
    part: str
    """Name of the figure or table that shows them."""
    ours: str = ""
    """The deciding number in few words, for the summary; empty: `detail`."""
    paper: str = ""
    """The number of the cited document; empty: it prints none, or the claim is a bound of this system."""
    asserted: bool = True
    """Whether the full run fails if the claim does not hold."""

    def verdict(self, setup: Setup) -> str:
        """Return the result in words; a run that judges no claims only reports its observation."""
        if setup.judges_claims:
            return "holds" if self.holds else "does not hold"
        return "seen at this size" if self.holds else "not seen at this size"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Part of the report about one experiment."""

    text: Sequence[str]
    """Paragraphs about the method."""
    parts: Sequence[Table | Figure]
    claims: Sequence[Claim] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Steps, and the section that shows their results."""

    title: str
    steps: Callable[[Setup], Sequence[Step]]
    section: Callable[[Setup, Mapping[str, Json]], Section]
    """Called with the results of all steps by name."""
    missing: Callable[[], str | None] = lambda: None
    """Returns the reason why the experiment cannot run on this machine, or None."""
    independent: bool = False
    """Each step is a measurement of its own: the section shows the finished ones, whatever run they come from."""
    only: Sequence[str] = ()
    """Run only the steps whose name is one of these or begins with one and a comma; empty: all."""

    def selects(self, step: str) -> bool:
        """Whether a step is to be run."""
        return not self.only or any(step == name or step.startswith(f"{name},") for name in self.only)
