"""The words of a reproduction: an experiment is cut into steps; their results make tables, figures and claims."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from experiments import machine, mpi
from thermocline.config.loader import flatten
from thermocline.config.schema import Config
from thermocline.errors import ConfigError
from thermocline.utils.cpu_affinity import cores
from thermocline.utils.machine import memory_bytes

Json = Any
Cell = str | float | int | None
Kind = Literal["measured", "predicted", "paper"]
Axis = Literal["linear", "log2", "log10"]

STEP_SECONDS = 480.0
"""No step works longer without a break."""


FULL_SCALE, QUICK_SCALE, QUICK_EFFORT = "1/1000", "1/100000", 0.1


def parse_scale(text: str) -> float:
    """What "1/1000" divides by."""
    match = re.fullmatch(r"\s*1\s*/\s*([0-9][0-9.eE+_]*)\s*", text)
    try:
        divisor = float(match[1]) if match else math.nan
    except ValueError:
        divisor = math.nan
    if not 1 <= divisor < math.inf:
        raise ConfigError(f'--scale is "{text}": write what the models are divided by as 1/1000, at least 1/1')
    return divisor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How large and how thorough."""

    scale: float = 1000.0
    """What the source's models are divided by."""
    effort: float = 1.0
    """How much is trained, against the full run."""
    seed: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    asserted: bool = True
    """Whether a claim that does not hold is an error: it is one of the full run."""
    memory: int = 8 << 30
    """Bytes of the top tier that an experiment may fill."""
    cores: int = dataclasses.field(default_factory=cores)
    """Of the machine; steps that measure speed depend on it."""
    dram: int = dataclasses.field(default_factory=memory_bytes)
    """Bytes of the machine's memory."""
    rival: bool = dataclasses.field(default_factory=lambda: mpi.missing() is None)
    """Whether the MPI rival can run there."""

    @classmethod
    def of(cls, *, quick: bool, scale: str | None, effort: float | None, seed: int, device: str) -> Self:
        """As the command line has it, on this machine: what is None is the full run's, or the quick one's."""
        if device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f'--device is "{device}": it is auto, cpu or cuda')
        gpu = machine.gpu_bytes()
        if device == "cuda" and not gpu:
            raise ConfigError('--device is "cuda", but torch sees no GPU: it may be auto or cpu')
        on_gpu = device != "cpu" and gpu > 0
        share = (QUICK_EFFORT if quick else 1.0) if effort is None else effort
        if not 0 < share <= 1:
            raise ConfigError(f"--effort is {share}: it lies above 0 and is at most 1, the full run")
        return cls(
            scale=parse_scale(scale or (QUICK_SCALE if quick else FULL_SCALE)),
            effort=share,
            seed=seed,
            device="cuda" if on_gpu else "cpu",
            asserted=not quick and share == 1,
            memory=min(memory_bytes() // 2, gpu * 6 // 10 if on_gpu else 1 << 62),
        )

    def asks_as(self, other: Setup) -> bool:
        """Whether both ask for the same, on whatever machines."""
        return (self.scale, self.effort, self.seed) == (other.scale, other.effort, other.seed)

    def seconds(self, cpu: float, gpu: float) -> float:
        """Of training in the full run: a GPU trains more in less."""
        return self.effort * (gpu if self.device == "cuda" else cpu)

    def count(self, full: int, least: int = 1) -> int:
        """What is `full` in the full run."""
        return max(least, round(full * self.effort))


TOO_SMALL = (
    "This run is too small to judge the sources' claims: the full run, without --quick and --effort, asserts them."
)
"""What is said beside claims of a run that asserts none."""


class Work:
    """What a step gets: a folder that lasts until it is done, and how long it may go on."""

    def __init__(self, folder: Path, limit: float = STEP_SECONDS, told: Callable[[float], None] | None = None) -> None:
        self.folder = folder
        self._end = time.monotonic() + limit
        self._told = told or (lambda share: None)

    @property
    def left(self) -> float:
        """Seconds; below 0: it is time to save and return None."""
        return self._end - time.monotonic()

    def tell(self, share: float) -> None:
        """How much of the step is done, 0 to 1."""
        self._told(share)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The smallest piece of work whose result is kept."""

    name: str
    """Unique within its experiment."""
    settings: Mapping[str, Json]
    """All that the result depends on beside the program: its key."""
    seconds: float
    """About how long it takes on two cores; only the display of the time left believes it."""
    run: Callable[[Work], Json | None]
    """The result, as JSON; none: not done yet, call again. It then goes on from what it left in its folder."""
    home: str | None = None
    """The experiment that it is a step of, if another one than that which uses it: it is done once for both."""


def settings_of(config: Config) -> dict[str, Json]:
    """Of a step that trains a config."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flatten(config.resolve())}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows for people (the page) and machines (CSV, JSON)."""

    name: str
    """Of its files."""
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    paper: Sequence[str] = ()
    """Columns whose figures are the source's."""
    predicted: Sequence[str] = ()
    """Columns whose figures are computed, not measured."""
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, or one colour of bars."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float | None]
    kind: Kind = "measured"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot. Bars have words for x, lines numbers."""

    name: str
    """Of its file."""
    title: str
    x: str
    y: str
    series: Sequence[Series]
    form: Literal["lines", "bars", "stacked"] = "lines"
    x_axis: Axis = "linear"
    y_axis: Axis = "linear"
    marks: Sequence[float] = ()
    """Places on the x axis that are marked."""
    marked: str = ""
    """What happens there."""
    levels: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Heights with a name: lines right across."""
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What the source says and these results show, or do not."""

    text: str
    holds: bool
    detail: str
    asserted: bool = True
    """Whether the full run fails without it."""

    def verdict(self, setup: Setup) -> str:
        """Whether it holds, in words: of a run that is too small to tell, only what is seen there."""
        if setup.asserted:
            return "holds" if self.holds else "does not hold"
        return "seen at this size" if self.holds else "not seen at this size"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What came of an experiment."""

    text: Sequence[str]
    """Paragraphs: what was done."""
    parts: Sequence[Table | Figure]
    claims: Sequence[Claim] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One file of this package has one."""

    title: str
    steps: Callable[[Setup], Sequence[Step]]
    section: Callable[[Setup, Mapping[str, Json]], Section]
    """From the results of all its steps, by name."""
