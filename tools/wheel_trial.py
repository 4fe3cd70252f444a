"""Use the wheel in dist/ as a new user does, in an empty environment outside the checkout. `make wheel-trial`.

    python3 tools/wheel_trial.py [--python 3.12] [--dist dist]

Installs torch of constraints.txt, then `thermocline[torch]` from dist/ as the README says, and runs: the config, the
commands and the loop of the README; the ports of DLRM, TorchRec and FuxiCTR of examples/; a CSV file with quoted
delimiters, quotes and line breaks, several values per column, times and a column without information, through train,
eval and predict. Prints a line per step, and ends with the output of the first step that fails. Standard library only.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from wheels import ROOT, WORK, environment, interpreters, run

EXAMPLES = 4000
"""Rows of the generated CSV files."""
MESSY = """\
[data]
train = ["messy.csv"]
valid = ["messy.csv"]
test = ["messy.csv"]
label = "clicked?"
numeric = ["price, EUR"]
ignore = ["row"]
separators = { "tags" = ";" }
time = "seen at"
[data.time_buckets]
sent = "hour_of_day"
[model]
name = "deepfm"
dim = 8
embedding_l2 = 0.0
[tiers]
mem = "64MB"
ssd = "messy-run/store"
[train]
epochs = 2
batch_size = 64
run_dir = "messy-run"
"""
"""The config of the own CSV file."""


def readme_block(kind: str, part: str) -> str:
    """Return the code block of the README of this kind that contains a text."""
    fences = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", _README)
    found = [block for language, block in fences if language == kind and part in block]
    if len(found) != 1:
        sys.exit(f"wheel_trial: the README has {len(found)} blocks of {kind or 'commands'} with {part!r}, not one")
    return found[0]


_README = (ROOT / "README.md").read_text()


def readme_commands() -> list[list[str]]:
    """Return the `thermocline` commands of the README, without their comments."""
    lines = readme_block("", "thermocline train").splitlines()
    return [line.partition("#")[0].split() for line in lines if line.startswith("thermocline ")]


def readme_files(folder: Path) -> None:
    """Write the files that the README's config names."""
    (folder / "ads.toml").write_text(readme_block("toml", "# ads.toml"))
    header = ["click", "price", "age", "user", "page"]
    draw = random.Random(1)

    def rows() -> Iterator[list[object]]:
        for _ in range(EXAMPLES):
            user = draw.randrange(200)
            click = int(draw.random() < (0.8 if user % 3 == 0 else 0.2))
            yield [click, f"{draw.random():.2f}", draw.randrange(18, 80), f"user {user}", f"/p/{draw.randrange(50)}"]

    for name in ("day_1.csv.gz", "day_2.csv.gz", "last.csv", "new.csv"):
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(header)
        writer.writerows(rows())
        data = text.getvalue().encode()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def messy_file(path: Path) -> None:
    """Write a CSV file with everything that spreadsheets put into one."""
    draw = random.Random(2)
    header = ["row", "clicked?", "price, EUR", "title", "tags", "sent", "seen at"]
    titles = ['the "best" offer', "a, b and c", "two\nlines", "", "plain", "caf\u00e9; naïve", " spaces "]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\r\n")
        writer.writerow(header)
        for row in range(EXAMPLES):
            title = draw.choice(titles)
            clicked = int(draw.random() < (0.85 if title in titles[:2] else 0.2))
            tags = ";".join(draw.sample(["new", "sale", "x y", "50% off"], draw.randrange(4)))
            price = "" if draw.random() < 0.1 else f"{draw.random() * 100:.2f}"
            sent = f"2026-01-{1 + row % 28:02} {row % 24:02}:15:00"
            seen = f"2026-02-{1 + row % 28:02}T{row % 24:02}:30:00+01:00"
            writer.writerow([f"r{row}", clicked, price, title, tags, sent, seen])


class Trial:
    """An environment with the wheel, and a folder to work in."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.env = {"PATH": str(python.parent), "HOME": str(folder), "STEPS": "150", "LC_ALL": "C.UTF-8"}
        self.count = 0

    def step(self, title: str, *command: str | Path, wanted: str = "", cwd: Path | None = None) -> str:
        """Run a command of the environment; exit unless it succeeds and its output has `wanted`, a pattern."""
        begin = time.monotonic()
        out = run(self.python.parent / command[0], *command[1:], env=self.env, cwd=cwd or self.folder)
        if not re.search(wanted, out):
            sys.exit(f"{out}\nwheel_trial: {title}: the output does not have {wanted!r}")
        self.done(title, begin, re.search(wanted, out)[0] if wanted else "")  # type: ignore[index]
        return out

    def done(self, title: str, begin: float, found: str = "") -> None:
        """Print the line of a step."""
        self.count += 1
        print(f"{self.count:2} {title}: {time.monotonic() - begin:.0f} s{found and ', ' + found}", flush=True)


def use_readme(trial: Trial) -> None:
    """Run the config, the commands and the loop of the README."""
    readme_files(trial.folder)
    for command in readme_commands():
        title = f"README: {' '.join(command)}"
        if command[1] == "watch":
            watch(trial, title, command)
        else:
            wanted = {"train": r"AUC\s+0\.\d+|auc 0\.\d+", "eval": r"(?i)auc\W+0\.\d+", "predict": ""}[command[1]]
            trial.step(title, *command, wanted=wanted)
    (trial.folder / "loop.py").write_text(readme_block("python", "tc.prefetch"))
    trial.step("README: own loop", "python", "loop.py")
    trial.step("README: own loop again, from its last checkpoint", "python", "loop.py")


def watch(trial: Trial, title: str, command: list[str]) -> None:
    """Start the live page on a free port, and read it."""
    begin = time.monotonic()
    words = [str(trial.python.parent / command[0]), *command[1:], "--port", "0"]
    process = subprocess.Popen(words, cwd=trial.folder, env=trial.env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = None
        for line in process.stdout:
            found = re.search(r"http://[\w.:]+/", line)
            if found:
                break
        if found is None:
            sys.exit(f"wheel_trial: {title} printed no address and ended with {process.wait()}")
        with urllib.request.urlopen(found[0], timeout=30) as page:
            if b"<html" not in page.read().lower():
                sys.exit(f"wheel_trial: {title}: {found[0]} is no page")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    trial.done(title, begin)


def use_ports(trial: Trial) -> None:
    """Run the ports of examples/, copied out of the checkout."""
    examples = trial.folder / "examples"
    shutil.copytree(ROOT / "examples", examples)
    trial.step("examples/make_data.py", "python", "make_data.py", cwd=examples)
    for library, wanted in (
        ("dlrm", r"AUC 0\.\d+ .*losses differ by at most \S+e-0[7-9]"),
        ("torchrec", r"AUC 0\.\d+"),
        ("fuxictr", r"AUC 0\.\d+"),
    ):
        trial.step(f"examples/port_{library}.py", "python", f"port_{library}.py", wanted=wanted, cwd=examples)


def use_own_csv(trial: Trial) -> None:
    """Train on a CSV file that no tool has cleaned."""
    messy_file(trial.folder / "messy.csv")
    (trial.folder / "messy.toml").write_text(MESSY)
    trial.step("own CSV: train", "thermocline", "train", "messy.toml")
    out = trial.step("own CSV: eval", "thermocline", "eval", "messy-run", wanted=r"(?i)auc\W+0\.\d+")
    auc = float(re.findall(r"(?i)auc\W+(0\.\d+)", out)[0])
    if auc < 0.6:
        sys.exit(f"{out}\nwheel_trial: own CSV: AUC is {auc}: the titles predict the labels")
    predict = ("thermocline", "predict", "messy-run", "messy.csv", "--out", "scores.csv")
    trial.step("own CSV: predict", *predict)
    with (trial.folder / "scores.csv").open(newline="") as file:
        scores = list(csv.reader(file))
    if len(scores) != EXAMPLES + 1:
        sys.exit(f"wheel_trial: own CSV: {len(scores) - 1} scores for {EXAMPLES} examples")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--python", default="3.11", help="version of the interpreter")
    arguments = parser.parse_args()
    found = interpreters([])
    if arguments.python not in found:
        sys.exit(f"wheel_trial: Python {arguments.python} is not here; found: {', '.join(found) or 'none'}")
    begin = time.monotonic()
    torch = re.search(r"(?m)^torch==\S+", (ROOT / "constraints.txt").read_text())
    assert torch is not None
    WORK.mkdir(parents=True, exist_ok=True)
    python = environment(WORK / "trial", found[arguments.python], torch[0])
    with tempfile.TemporaryDirectory(prefix="thermocline-trial-") as folder:
        trial = Trial(python, Path(folder))
        trial.done(f"new environment of Python {arguments.python} with {torch[0]}", begin)
        begin = time.monotonic()
        pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:")
        install = ("--constraint", ROOT / "constraints.txt", "--find-links", arguments.dist.resolve())
        run(python, *pip, *install, "thermocline[torch]", "pyyaml", cwd=Path(folder))
        where = run(python, "-c", "import thermocline; print(thermocline.__file__)", env=trial.env, cwd=Path(folder))
        if not Path(where.strip()).is_relative_to(WORK / "trial"):
            sys.exit(f"wheel_trial: the package is {where.strip()}, not that of the wheel")
        trial.done("pip install --find-links dist thermocline[torch]", begin)
        use_readme(trial)
        use_ports(trial)
        use_own_csv(trial)
    versions = run(python, "-c", _VERSIONS)
    print(f"all {trial.count} steps succeeded: {versions.strip()}")


_VERSIONS = (
    "import importlib.metadata as m, sys; print(f'Python {sys.version.split()[0]}', "
    "*(f'{name} {m.version(name)}' for name in ('thermocline', 'torch', 'numpy', 'pyarrow')), sep=', ')"
)


if __name__ == "__main__":
    main()
