"""Kernels run on the GPU if there is one, else under Triton's interpreter: `thermocline.kernels` selects it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from thermocline.kernels import INTERPRETED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill torch.empty with NaN and the largest integers, so that reads of uninitialized memory change results."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
