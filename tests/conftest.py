"""Hypothesis profiles (quick in `make test`, long with THERMOCLINE_LONG=1), shared fixtures, skipped GPU tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("quick", deadline=None, max_examples=100, suppress_health_check=_checks, print_blob=True)
settings.register_profile("long", parent=settings.get_profile("quick"), max_examples=5000)
settings.load_profile("long" if os.environ.get("THERMOCLINE_LONG") == "1" else "quick")


def pytest_configure() -> None:
    """Restore the SIGINT handler: a background job of a shell ignores SIGINT, which some tests send.

    Select Triton's interpreter before a test imports Triton, which some modules of torch do.
    """
    from helpers.triton_types import cache_types

    from thermocline.kernels import INTERPRETED

    if INTERPRETED:
        cache_types()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (graphs := os.environ.get("THERMOCLINE_GRAPHS")) is not None:
        _set_graphs(graphs == "1")


def _set_graphs(enabled: bool) -> None:
    """Record steps and planning, or not, in every test that does not choose: THERMOCLINE_GRAPHS=1 or 0."""
    from thermocline.config.train import TrainConfig
    from thermocline.tiers.hbm_backend import HbmBackend

    set_config, start = TrainConfig.__init__, HbmBackend.__init__

    def set_config_so(self: TrainConfig, *args: Any, **settings: Any) -> None:
        set_config(self, *args, **{"graphs": "auto" if enabled else "off"} | settings)

    def start_so(self: HbmBackend, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        self.record_planning(enabled)

    TrainConfig.__init__ = set_config_so  # type: ignore[method-assign]
    HbmBackend.__init__ = start_so  # type: ignore[method-assign]


@pytest.fixture
def command_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a command-line test in `tmp_path`, and restore the torch threads that a config sets."""
    import torch

    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Import all tests without garbage collection, which took a third of the time and found almost nothing.

    What was imported is exempt from later collections, too.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device: smaller cases run under Triton's interpreter"))
