"""tools/wheels.py: the SBOM and the files it adds to a wheel; and, as a long test, the whole build."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import thermocline as tc

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "tools" / "wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMPONENT = {"name": "nanobind", "version": "3.1.0", "licence": "BSD-3-Clause", "text": "the licence"}


def test_sbom_names_what_is_linked_and_what_is_required(wheels: ModuleType) -> None:
    bom = json.loads(wheels.sbom([COMPONENT], "1.2"))
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert bom["metadata"]["component"]["purl"] == "pkg:pypi/thermocline@1.2"
    linked, *required = bom["components"]
    assert (linked["name"], linked["licenses"]) == ("nanobind", [{"expression": "BSD-3-Clause"}])
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [part["description"].rpartition(" ")[2] for part in required] == declared
    assert {part["purl"] for part in required} >= {"pkg:pypi/numpy", "pkg:pypi/pyarrow"}
    references = {part["bom-ref"] for part in bom["components"]}
    assert set(bom["dependencies"][0]["dependsOn"]) == references


def test_licences_are_added_to_a_wheel(wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "thermocline-1.2-cp312-abi3-linux_x86_64.whl"
    metadata = "Metadata-Version: 2.4\nName: thermocline\nLicense-File: LICENSE\n\nText\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thermocline/core/_core.abi3.so", b"\x7fELF")
        archive.writestr("thermocline-1.2.dist-info/METADATA", metadata)
        archive.writestr("thermocline-1.2.dist-info/RECORD", "")
    monkeypatch.setattr(wheels, "linked", lambda tools, zig: [COMPONENT])
    wheels.add_licences(path, Path("python"), Path("python"))
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
        mode = archive.getinfo("thermocline/core/_core.abi3.so").external_attr >> 16
    assert mode == 0o755
    assert files["thermocline-1.2.dist-info/licenses/nanobind/LICENSE"] == b"the licence"
    assert b"License-File: LICENSE\nLicense-File: nanobind/LICENSE\n" in files["thermocline-1.2.dist-info/METADATA"]
    record = list(csv.reader(files["thermocline-1.2.dist-info/RECORD"].decode().splitlines()))
    assert {row[0] for row in record} == set(files)
    for name, digest, size in record:
        if digest:
            data = files[name]
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={expected}", str(len(data)))


def test_interpreters_are_found_by_version(wheels: ModuleType) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = wheels.interpreters([sys.executable])
    assert found.get(version) == sys.executable if version in wheels.PYTHONS else version not in found


def digest_of_source(isa: str = "avx512") -> str:
    """Return what tools/wheel_check.py prints for the package in src/."""
    command = [sys.executable, str(ROOT / "tools" / "wheel_check.py"), str(ROOT / "src")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "THERMOCLINE_ISA": isa}
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()


def test_digest_is_the_same_with_every_instruction_set(wheels: ModuleType) -> None:
    digests = {digest_of_source(isa) for isa in wheels.ISAS}
    assert len(digests) == 1
    assert len(digests.pop()) == 64


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    module = importlib.import_module("wheel_trial")
    monkeypatch.delitem(sys.modules, "wheel_trial")
    monkeypatch.delitem(sys.modules, "wheels")
    return module


def test_trial_runs_every_command_of_the_readme(trial: ModuleType, tmp_path: Path) -> None:
    assert [command[1] for command in trial.readme_commands()] == ["train", "eval", "predict", "watch"]
    trial.readme_files(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ads.toml", "day_1.csv.gz", "day_2.csv.gz", "last.csv", "new.csv"]
    assert "tc.Checkpoints" in trial.readme_block("python", "tc.prefetch")


def test_trial_reads_its_own_csv_file(trial: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trial.messy_file(tmp_path / "messy.csv")
    text = (tmp_path / "messy.csv").read_bytes()
    assert b'"two\nlines"' in text
    assert b'"the ""best"" offer"' in text
    data = tc.Config.parse(trial.MESSY).data
    reader = tc.Reader(data.train, data, batch_size=512)
    assert sum(batch.examples for batch in reader) == trial.EXAMPLES


def test_trial_ends_at_the_first_failure(trial: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = trial.Trial(Path(sys.executable), tmp_path)
    name = Path(sys.executable).name
    steps.step("works", name, "-c", "print('AUC 0.7')", wanted=r"AUC 0\.\d")
    assert re.fullmatch(r" 1 works: \d+ s, AUC 0\.7\n", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="the output does not have 'AUC'"):
        steps.step("prints nothing", name, "-c", "", wanted="AUC")
    with pytest.raises(SystemExit, match="this command failed with 3"):
        steps.step("fails", name, "-c", "raise SystemExit(3)")


@pytest.mark.long
def test_build_and_test_of_all_wheels(tmp_path: Path) -> None:
    """Minutes to an hour: builds both wheels and tests them with every Python of this machine."""
    command = [sys.executable, str(ROOT / "tools" / "wheels.py"), "--dist", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    names = sorted(path.name for path in tmp_path.glob("*.whl"))
    assert [name.split("-")[2:4] for name in names] == [["cp311", "cp311"], ["cp312", "abi3"]]
    assert all(name.endswith("manylinux_2_28_x86_64.whl") for name in names)
    digest = digest_of_source()
    assert f"digest {digest[:16]}" in result.stdout, f"{digest} of the source build:\n{result.stdout}"
