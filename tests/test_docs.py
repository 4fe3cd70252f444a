"""README and docs: links, paths, commands and config keys exist; configs parse; Python blocks run."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import subprocess
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import thermocline as tc
from thermocline.cli.main import app

ROOT = Path(__file__).parents[1]
GUIDES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/faults/README.md")),
    *sorted({*ROOT.glob("*/README.md"), *(ROOT / "docs").rglob("*.md")}),
]
PAGES = [*GUIDES, ROOT / "CHANGELOG.md"]
"""The changelog also names modules, attributes and paths of earlier versions."""
FOLDERS = "src|csrc|tests|benchmarks|baselines|examples|experiments|tools|docs"
GENERATED = {"benchmarks/COMMIT"}
"""Paths that a documented command writes and git ignores."""
PACKAGES = [path.name for path in (ROOT / "src/thermocline").iterdir() if (path / "__init__.py").exists()]


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced code blocks of `language`; "" selects blocks without a language."""
    return [text for kind, text in re.findall(r"```(\w*)\n(.*?)```", page.read_text(), re.DOTALL) if kind == language]


def block(page: str, language: str, words: str) -> str:
    """Return the code block of a page that contains `words`."""
    return next(text for text in blocks(ROOT / page, language) if words in text)


def prose(page: Path) -> str:
    """Return the text of a page without its code blocks."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def test_readme_has_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_commits_exist_or_are_marked_as_of_before_a_rebase() -> None:
    try:
        if git("rev-parse", "--is-shallow-repository").strip() == "true":
            pytest.skip("a clone without history")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout")
    names = r"\b(?=\w*[0-9])(?=\w*[a-f])(?:[0-9a-f]{7}|[0-9a-f]{10})\b"
    named = [
        (page_id(page), match[0])
        for page in PAGES
        for match in re.finditer(rf"({names})(?! \(?before a rebase)", " ".join(page.read_text().split()))
    ]
    known = set()
    for line in git("rev-list", "HEAD").splitlines():
        known |= {line[:7], line[:10]}
    assert [each for each in named if each[1] not in known] == []


# ---- names


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, by GitHub's rule."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def resolves(link: str, page: Path) -> bool:
    """Check that the file of a relative link exists and has the heading that the link names."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def test_relative_links_resolve() -> None:
    for page in PAGES:
        links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not re.match(r"[a-z]+:", link)]
        assert [link for link in links if not resolves(link, page)] == [], page_id(page)


def test_cited_documents_have_authors_title_and_year() -> None:
    """In pages and in the texts of the experiments."""
    rows = [row.split("|")[1:3] for row in (ROOT / "docs/references.md").read_text().splitlines() if ": *" in row]
    documents = {name.strip(): text for name, text in rows}
    assert [name for name, text in documents.items() if not re.search(r"[A-Z]\. .+: \*.+\*\..* \d{4}", text)] == []
    cited = set()
    for page in [*PAGES, *(ROOT / "experiments").glob("*.py")]:
        cited |= set(re.findall(r"([A-Z]\w+ (?:et al\.|and [A-Z]\w+)),? \(?(\d{4})\)", page.read_text()))
    assert len(cited) >= 4
    assert {f"{authors} ({year})" for authors, year in cited} - documents.keys() == set()


def test_every_page_is_in_the_index() -> None:
    for index in (ROOT / "docs/README.md", ROOT / "docs/benchmarks/README.md"):
        linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", index.read_text())}
        assert set(index.parent.glob("*.md")) - {index} <= linked


def test_named_paths_exist() -> None:
    """Check paths from the repository root, such as csrc/ssd/store.h, and from the package, such as tiers/dram.py."""
    for page in GUIDES:
        text = page.read_text()
        plain = re.sub(r"\[[^\]]*\]\([^)]*\)", "", prose(page))  # links have their own test
        named = re.findall(rf"(?<![\w./:-])(?!examples/s\b)(?:{FOLDERS})/[\w./*-]*\w", plain)
        named += re.findall(r"\bpython ((?:\w+/)+\w+\.py)", text)
        inside = re.findall(rf"(?<![\w./])((?:{'|'.join(PACKAGES)})/\w+\.pyi?)\b", text)
        named += [f"src/thermocline/{path}" for path in inside if not (ROOT / path).exists()]
        assert [path for path in named if path not in GENERATED and not any(ROOT.glob(path))] == [], page_id(page)


def test_pages_named_in_source_files_exist() -> None:
    for folder in ("src", "csrc", "benchmarks", "examples", "experiments", "tools"):
        for file in (path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".h", ".cc")):
            named = re.findall(r"\bdocs/[\w/-]+\.md", file.read_text())
            assert [page for page in named if not (ROOT / page).exists()] == [], file


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_named_modules_exist() -> None:
    """Check dotted names such as thermocline.models: a module, or an attribute of one."""
    for page in GUIDES:
        for name in re.findall(r"\bthermocline(?:\.[a-z_]\w*)+", page.read_text()):
            file = name.endswith(".json")
            assert file or is_module(name) or is_module(name.rpartition(".")[0]), (page_id(page), name)


def test_named_attributes_of_the_package_exist() -> None:
    for page in GUIDES:
        names = set(re.findall(r"\btc\.([A-Za-z]\w*)", page.read_text()))
        assert [name for name in names if not hasattr(tc, name)] == [], page_id(page)


def test_named_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:`|^)make ([\w-]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, page_id(page)


# ---- commands


def command_of(words: list[str]) -> Any:
    """Return the command that a command line calls; None if there is no such command."""
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        command = command.commands.get(words.pop(0))
    return command


def test_documented_commands_and_options_exist() -> None:
    for page in GUIDES:
        for line in "".join(blocks(page, "")).splitlines():
            call = re.search(r"(?:^|-m )thermocline (.*)", line.split(" #")[0])
            if call is None:
                continue
            words = re.sub(r"[\[\]]", "", call[1]).split()
            command = command_of([word for word in words if not word.startswith("-")])
            assert command is not None, line
            known = {name for parameter in command.params for name in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, line


# ---- config


def config_keys(cls: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every key of a config section, nested sections included."""
    for name, hint in typing.get_type_hints(cls).items():
        nested = [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]
        if nested:
            yield from config_keys(nested[0], f"{prefix}{name}.")
        elif name in {field.name for field in dataclasses.fields(cls)}:
            yield prefix + name


def test_every_config_key_is_documented() -> None:
    text = (ROOT / "docs/command-line.md").read_text().partition("## Configuration")[2]
    documented: set[str] = set()
    for title, rows in re.findall(r"^### (\[.*?)\n(.*?)(?=^### |\Z)", text, re.MULTILINE | re.DOTALL):
        sections = re.findall(r"\[([\w.]+)\]", title)
        prefix = f"{sections[0]}." if len(sections) == 1 else "data." if sections[0].startswith("data.") else ""
        for row in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE):
            documented |= {prefix + name for name in re.findall(r"`([\w.]+)`", row)}
    numeric = (ROOT / "docs/data-formats.md").read_text().partition("## Numeric columns")[2].partition("\n## ")[0]
    documented |= {f"data.numeric_features.{name}" for name in re.findall(r"^\| `(\w+)`", numeric, re.MULTILINE)}
    assert documented == set(config_keys(tc.Config))


def test_config_blocks_parse() -> None:
    for page in GUIDES:
        for text in blocks(page, "toml"):
            assert isinstance(tc.Config.parse(text, name=page_id(page)), tc.Config)


@pytest.fixture
def ads_folder(tmp_path: Path) -> Path:
    """A folder with the files that the README's config names."""
    lines = ["click,price,age,site,ad", *(f"{i % 2},{i},{i % 50},{i % 7},{i % 11}" for i in range(400))]
    for name in ("day_1.csv", "last.csv"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return tmp_path


def test_readme_config_trains_hashed_and_quantized(ads_folder: Path) -> None:
    """The config of README, extended by the sections of docs/precision-and-hashing.md."""
    config = block("README.md", "toml", "# ads.toml")
    more = block("docs/precision-and-hashing.md", "toml", "[data.hashing]")
    text = config.replace("day_*.csv.gz", str(ads_folder / "day_*.csv"))
    text = text.replace("last.csv", str(ads_folder / "last.csv"))
    sets = [
        f"train.run_dir={ads_folder / 'run'}",
        f"tiers.ssd={ads_folder / 'store'}",
        "tiers.mem=64MB",
        "model.hidden=[8]",
    ]
    for wanted in (more, more.replace("# range", "range").replace("# scale_lr", "scale_lr")):
        parsed = tc.Config.parse(f"{text}\n{wanted}", [*sets, "train.display=false", "train.tensorboard=false"])
        assert (parsed.precision.kind, parsed.data.hashing.k) == ("int8", 1 << 24)  # type: ignore[union-attr]
    assert parsed.precision.scale_lr == 0.01
    with tc.Run(parsed) as run:
        assert run.fit().progress.examples == 400


# ---- programs


def run_program(text: str) -> dict[str, Any]:
    """Run a documented program on fewer examples; return its variables."""
    names: dict[str, Any] = {}
    exec(re.sub("examples=10[02]_[04]00", "examples=53_248", text).replace("keys=1_000_000", "keys=50_000"), names)
    return names


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_torch_thread")
def test_readme_loop_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = block("README.md", "python", "tc.prefetch")
    first = run_program(program)
    assert (first["saved"], first["step"]) == (None, 52)
    first["checkpoints"].close()
    first["table"].close()
    second = run_program(program)
    assert (second["saved"].step, second["step"]) == (50, 52)
    for before, after in zip(first["mlp"].parameters(), second["mlp"].parameters(), strict=True):
        assert torch.equal(before, after)
    second["checkpoints"].close()
    second["table"].close()


@pytest.mark.usefixtures("one_torch_thread")
def test_trainer_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = run_program(block("docs/training-loop.md", "python", "tc.Trainer"))
    assert made["result"].progress.examples == 2 * 53_248
    made["table"].close()


def test_hashing_program_runs() -> None:
    made = run_program(block("docs/precision-and-hashing.md", "python", "tc.hashing"))
    assert made["ids"].tolist() == made["hashed"].ids.tolist()
    assert made["ids"][3] in made["ids"][:3]
    assert made["table"].precision.bits == 8
    made["table"].close()
