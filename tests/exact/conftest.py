from __future__ import annotations

import os

import pytest
from exact import run


@pytest.fixture(scope="session", autouse=True)
def _share_references(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compute each reference once for all pytest-xdist workers: it takes seconds of Python."""
    base = tmp_path_factory.getbasetemp()
    run.shared_dir = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
