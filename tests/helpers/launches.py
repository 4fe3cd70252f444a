"""Counts the launches of kernels: by the launcher on a GPU, by Triton's interpreter elsewhere."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from thermocline.kernels import INTERPRETED
from thermocline.kernels.launch import Kernel, RepeatedLaunch


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by one name with every launch of a kernel by the calling thread."""
    launched: list[str] = []
    caller = threading.get_ident()

    def add(name: str) -> None:
        if threading.get_ident() == caller:
            launched.append(name)

    if INTERPRETED:
        from triton.runtime.interpreter import GridExecutor

        execute = GridExecutor.__call__

        def executed(self: Any, *args: Any, **constants: Any) -> Any:
            add(self.fn.__name__)
            return execute(self, *args, **constants)

        monkeypatch.setattr(GridExecutor, "__call__", executed)
        return launched
    launch, values = Kernel.launch, RepeatedLaunch._values

    def counted(self: Kernel, *given: Any) -> None:
        add(self._function.fn.__name__)
        launch(self, *given)

    def repeated(self: RepeatedLaunch, given: Any) -> Any:
        found = values(self, given)
        if found is not None:  # otherwise `Kernel.launch` runs
            add(self._kernel._function.fn.__name__)
        return found

    monkeypatch.setattr(Kernel, "launch", counted)
    monkeypatch.setattr(RepeatedLaunch, "_values", repeated)
    return launched
