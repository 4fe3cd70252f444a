"""Hooks of MkDocs (mkdocs.yml): pages of the API from the public names, pages of notebooks, links out of docs/.

Uses the standard library and MkDocs only; the package is read as text, not imported.
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src/thermocline"
SUBPACKAGES = ("serving", "torchrec")
"""Packages whose public names are those of their own __init__.py; the others are in thermocline/__init__.pyi."""
TITLES = {
    "batch": "Batches", "checkpoint": "Checkpoints", "config": "Configuration", "data": "Data", "distributed": "Ranks",
    "embedding": "Tables and bags", "errors": "Errors", "pipeline": "Pipeline", "serving": "Serving", "tiers": "Tiers",
    "torchrec": "TorchRec", "training": "Training",
}  # fmt: skip


def on_config(config: Any) -> Any:
    """Add pages that `nav` does not name to its guides, or to its measurements."""
    sections = {title: pages for entry in config.nav for title, pages in entry.items()}
    named = json.dumps(config.nav)
    for folder, section in (("", "Guides"), ("benchmarks/", "Measurements")):
        pages = sorted(f"{folder}{path.name}" for path in (ROOT / "docs" / folder).glob("*.md"))
        sections[section] += [page for page in pages if f'"{page}"' not in named]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    pages = {f"api/{group}.md": text for group, text in api_pages().items()}
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        pages[f"notebooks/{path.stem}.md"] = notebook_page(json.loads(path.read_text()), path.name)
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to files of the repository outside of docs/ by links to `repo_url`, or by their text."""
    folder = (ROOT / "docs" / page.file.src_path).parent

    def replace(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match[2].partition("#")[0]))
        if re.match(r"[a-z]+:|#", match[2]) or path.is_relative_to(ROOT / "docs"):
            return match[0]
        if config.repo_url:
            return f"[{match[1]}]({config.repo_url.rstrip('/')}/blob/main/{path.relative_to(ROOT)})"
        return match[1] if match[1].startswith("`") else f"{match[1]} (`{path.relative_to(ROOT)}`)"

    pieces = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    return "".join(
        piece if piece.startswith("```") else re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", replace, piece)
        for piece in pieces
    )


# ---- API


def api_pages() -> dict[str, str]:
    """Return one page per package with the reference of its public names."""
    names: dict[str, list[str]] = {}
    for module in public_modules(PACKAGE / "__init__.pyi", "thermocline"):
        names.setdefault(module.split(".")[1], []).append(module)
    for package in SUBPACKAGES:
        names[package] = public_modules(PACKAGE / package / "__init__.py", f"thermocline.{package}")
    pages = {group: _page(group, found) for group, found in names.items()}
    for name, module in _assigned(PACKAGE / "__init__.py", "_MODULES", {}).items():
        pages[name] = f"# tc.{name}\n\n::: {module}\n    options:\n      show_root_heading: false\n"
    return pages


def public_modules(path: Path, package: str) -> list[str]:
    """Return the full names that a package exports: `import NAME as NAME`, and the names of `__all__`."""
    listed = set(_assigned(path, "__all__", []))
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in listed:
            found.append(f"{package}.{node.name}")
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            module = f"{package}.{node.module}" if node.level else node.module
            exported = [alias for alias in node.names if alias.asname == alias.name or alias.name in listed]
            found += [f"{module}.{alias.name}" for alias in exported]
    return found


def _assigned(path: Path, name: str, absent: Any) -> Any:
    """Return the literal that a module assigns to a name."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return ast.literal_eval(node.value)
    return absent


def _page(group: str, names: list[str]) -> str:
    title = TITLES.get(group, group.capitalize())
    package = f"thermocline.{group}" if group in SUBPACKAGES else "thermocline"
    head = f"# {title}\n\nPublic names of `{package}`; usually `import thermocline as tc`.\n"
    return head + "".join(f"\n::: {name}\n" for name in names)


# ---- notebooks


def notebook_page(notebook: dict[str, Any], name: str) -> str:
    """Return a notebook as Markdown: texts, code, and text outputs."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source:
            parts.append(f"```python\n{source}\n```")
            shown = "".join(filter(None, map(_output, cell.get("outputs", ())))).rstrip()
            if shown:
                parts.append(f"```text\n{shown}\n```")
    parts.append(f"[Download this notebook]({name})")
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    text = output.get("text") or output.get("data", {}).get("text/plain") or ""
    return "".join(text) if output.get("output_type") != "error" else ""
