"""The package as a whole: modules loaded by an import, public names, version, sizes as text, errors."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import thermocline as tc
import thermocline.kernels  # before torch imports Triton: it selects the interpreter if there is no GPU
from thermocline.utils.text_format import format_size, parse_size


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_loads_no_torch_numpy_pydantic_or_core() -> None:
    loaded = run_python("import sys, thermocline; print(*sys.modules)").split()
    assert not {"torch", "numpy", "pydantic", "thermocline.core._core"} & set(loaded)


def test_store_table_and_pipeline_load_no_torch() -> None:
    names = ["Batch", "DramTier", "ReferenceTable", "SsdStore", "Table", "prefetch"]
    loaded = run_python(f"import sys, thermocline as tc; [getattr(tc, n) for n in {names}]; print(*sys.modules)")
    assert "torch" not in loaded.split()
    assert "thermocline.core._core" in loaded.split()


def test_openmp_wait_policy_is_passive_unless_set() -> None:
    code = "import thermocline, os; print(os.environ['OMP_WAIT_POLICY'])"
    plain = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for environment, expected in ((plain, "PASSIVE"), ({**plain, "OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == expected


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in tc.__all__:
        assert getattr(tc, name) is not None
        assert name in dir(tc)


def test_stub_and_package_have_the_same_names() -> None:
    """Type checkers read `__init__.pyi`, lazy_loader only its relative imports: the rest must agree with `__all__`."""
    tree = ast.parse(Path(tc.__file__).with_suffix(".pyi").read_text())
    imported = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in imported), "only `X as X` is re-exported"
    assigned = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
    assigned += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    names = [alias.name for alias in imported] + [target.id for target in assigned if isinstance(target, ast.Name)]
    assert sorted(names) == sorted(tc.__all__)


def test_hashing_is_the_module_of_hash_functions() -> None:
    assert tc.hashing is importlib.import_module("thermocline.data.feature_hashing")


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Stroe'"):
        tc.Stroe  # noqa: B018


def test_version_matches_the_installed_package() -> None:
    try:
        installed = importlib.metadata.version("thermocline")
    except importlib.metadata.PackageNotFoundError:
        installed = tc.__version__  # imported from a source tree
    assert tc.__version__ == installed
    assert tc.__version__.count(".") == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (0, 0),
        (4096, 4096),
        ("0", 0),
        ("123", 123),
        ("1B", 1),
        ("1k", 1000),
        ("256MB", 256_000_000),
        ("256 mb", 256_000_000),
        ("2GB", 2_000_000_000),
        ("1.5GiB", 3 << 29),
        ("0.1KB", 100),
        (".5MiB", 1 << 19),
        ("1TiB", 1 << 40),
        ("9007199254740993B", 9007199254740993),  # more than a double holds
    ],
)
def test_sizes(text: str | int, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1 XB", "1.2.3GB", "1e9", "inf", "1MBs", "٣MB"])
def test_invalid_sizes_raise(text: str) -> None:
    with pytest.raises(ValueError, match="mem_budget is"):
        parse_size(text, "mem_budget")


def test_sizes_of_wrong_type_or_sign_raise() -> None:
    for value in (True, None, 1.5):
        with pytest.raises(TypeError, match="budget is"):
            parse_size(value, "budget")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="negative"):
        parse_size(-1)


def test_format_size() -> None:
    assert [format_size(n) for n in (0, 999, 1000, 1_234_567, 999_600, 2.5e12)] == [
        "0 B",
        "999 B",
        "1 KB",
        "1.23 MB",
        "1 MB",
        "2.5 TB",
    ]


def test_error_classes_have_one_root() -> None:
    assert issubclass(tc.StoreError, tc.ThermoclineError)
    assert issubclass(tc.BudgetError, tc.ThermoclineError)
    for kind in (tc.CorruptionError, tc.LockError, tc.FormatError, tc.ReadOnlyError, tc.NotFoundError, tc.IoError):
        assert issubclass(kind, tc.StoreError)
    assert issubclass(tc.DiskFullError, tc.IoError)
    assert issubclass(tc.IoError, OSError)


def test_errors_are_picklable() -> None:  # required by process pools
    error = pickle.loads(pickle.dumps(tc.DiskFullError(28, "log-000001.tc: no space")))
    assert type(error) is tc.DiskFullError
    assert error.errno == 28
