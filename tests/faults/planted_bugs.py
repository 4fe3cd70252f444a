"""Shared by mutants.py and mutants_python.py: plants bugs in a copy of the sources and counts those detected."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class PythonMutant(Mutant):
    tests: str
    """File, or one test, that has to detect it."""


@dataclasses.dataclass(frozen=True)
class CppMutant(Mutant):
    tests: str
    """Beginning of the names of the C++ tests that have to detect it."""


M = TypeVar("M", bound=Mutant)


def chosen(mutants: Sequence[M], names: Sequence[str]) -> list[M]:
    """Return the mutants whose names contain one of `names`; all if there are none."""
    return [m for m in mutants if not names or any(n in m.name for n in names)]


def mismatches(mutants: Sequence[Mutant], sources: Path) -> list[str]:
    """Return the mutants whose text does not occur exactly once in the sources, or that change nothing."""
    found = []
    for mutant in mutants:
        path = sources / mutant.file
        count = path.read_text().count(mutant.old) if path.exists() else 0
        if count != 1:
            found.append(f"'{mutant.name}' does not match {mutant.file}: its text occurs {count} times")
        elif mutant.new == mutant.old:
            found.append(f"'{mutant.name}' changes nothing")
    return found


def plant(
    mutants: Sequence[M], copy: Path, listed_in: str, clean: Callable[[], str], detect: Callable[[M], str]
) -> int:
    """Plant each mutant in the sources at `copy`; return 0 if the tests detect all.

    listed_in   file to update if a mutant does not match
    clean       runs the tests without a planted bug; returns the first failure, or ""
    detect      runs the tests of a planted bug; returns the first failure, or ""
    """
    if wrong := mismatches(mutants, copy):  # before long builds
        raise SystemExit("\n".join([*wrong, f"update them in {listed_in}"]))
    if reason := clean():
        raise SystemExit(f"the tests fail without a planted bug: {reason}")
    detected = 0
    for mutant in mutants:
        start, path = time.monotonic(), copy / mutant.file
        text = path.read_text()
        path.write_text(text.replace(mutant.old, mutant.new))
        reason = detect(mutant)
        path.write_text(text)
        detected += bool(reason)
        verdict = f"detected by {reason}" if reason else "NOT DETECTED"
        print(f"{mutant.name} ({time.monotonic() - start:.0f} s): {verdict}", flush=True)
    print(f"planted bugs detected: {detected} of {len(mutants)}")
    return 0 if detected == len(mutants) else 1
