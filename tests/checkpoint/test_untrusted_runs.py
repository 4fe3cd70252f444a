"""Runs from elsewhere: no manifest leads to reads or writes outside of the run's folder, or to unbounded memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import thermocline as tc
from thermocline.checkpoint import state_tree
from thermocline.checkpoint.manifest import decode_manifest, encode_manifest
from thermocline.cli.inspect import inspect
from thermocline.data.features import Features
from thermocline.tiers.ssd import SsdStore
from thermocline.utils import untrusted_files

OUTSIDE = "outside"
LINK = "link.safetensors"


def make_table(**options: Any) -> tc.Table:
    return tc.Table(4, tc.Adagrad(lr=0.1), mem="1MB", ssd_mem="16MB", **options)


def make_checkpoints(run_dir: Path, table: tc.Table, **options: Any) -> tc.Checkpoints:
    model = torch.nn.Linear(2, 1)
    return tc.Checkpoints(run_dir, [table], model, torch.optim.SGD(model.parameters()), **options)


def write_run(run_dir: Path, **options: Any) -> None:
    """Save a run of one step."""
    with contextlib.closing(make_table(**options)) as table:
        checkpoints = make_checkpoints(run_dir, table)
        bag = tc.EmbeddingBag(table, fields=1)
        batch = tc.Batch(np.arange(5, dtype=np.uint64), np.arange(6), fields=1)
        with tc.prefetch([batch], table) as ready:
            for current in ready:
                bag(current).sum().backward()
                table.step()
        checkpoints.save(1)
        checkpoints.close()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, a folder outside of it with copies of its files, and symlinks to them."""
    folder = tmp_path_factory.mktemp("template")
    write_run(folder / "run")
    shutil.copytree(folder / "run", folder / OUTSIDE)
    (state,) = (folder / OUTSIDE / "checkpoints").glob("*.safetensors")
    (folder / "run" / "checkpoints" / LINK).symlink_to(state)
    return folder


def manifest_path(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("*.json"))


def read(run_dir: Path) -> dict[str, Any]:
    path = manifest_path(run_dir)
    return decode_manifest(path.read_bytes(), str(path))


def write(run_dir: Path, manifest: Any) -> None:
    manifest_path(run_dir).write_bytes(encode_manifest(manifest))


# ---- what a command opens


class Opened:
    """Records the paths that this process opens, creates, renames or removes through Python or the store."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.active = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.active and event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.link"):
            self.paths += [
                os.fsdecode(arg) for arg in args[:2] if isinstance(arg, (str, bytes)) and arg not in ("r", "rb")
            ]

    def outside(self, run_dir: Path) -> list[str]:
        """Return the recorded paths in the test's folder, but not in the run's."""
        found = [Path(path).resolve() for path in self.paths]
        return [str(path) for path in found if path.is_relative_to(run_dir.parent) and not path.is_relative_to(run_dir)]


OPENED = Opened()
sys.addaudithook(OPENED)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    original = SsdStore.open.__func__  # type: ignore[attr-defined]

    def open_store(cls: Any, path: Any, *args: Any, **options: Any) -> Any:
        OPENED.paths.append(os.fspath(path))
        return original(cls, path, *args, **options)

    monkeypatch.setattr(SsdStore, "open", classmethod(open_store))
    OPENED.paths, OPENED.active = [], True
    yield OPENED
    OPENED.active = False


NAMES = [
    "..",
    "../..",
    f"../../{OUTSIDE}/checkpoints/x",
    f"../{OUTSIDE}",
    "/etc/passwd",
    "",
    ".",
    "a/b",
    "\0",
    "x" * 300,
]
HOSTILE = st.sampled_from([*NAMES, LINK])
VALUES = HOSTILE | st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
TREES = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(HOSTILE, inner, max_size=2))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a JSON tree with each of its keys, except the dense state, which names no file."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(item, (dict, list)) and key != "dense":
            yield from places(item)


def mutate(data: st.DataObject, manifest: dict[str, Any], folder: Path) -> None:
    """Replace, rename or add entries at random places."""
    if data.draw(st.booleans()):
        store = {
            name: {"folder": data.draw(HOSTILE), "epoch": 2, "note": table["note"]}
            for name, table in manifest["tables"].items()
        }
        manifest["ranks"] = [{"stores": store, "position": None, "extra": None}] * data.draw(st.integers(1, 2))
    for _ in range(data.draw(st.integers(1, 3))):
        places_now = list(places(manifest))
        container, key = places_now[data.draw(st.integers(0, len(places_now) - 1))]
        if isinstance(container, dict) and data.draw(st.booleans()):
            name = data.draw(HOSTILE | st.just(str(folder / OUTSIDE)))
            container[name] = container[key]
            if data.draw(st.booleans()) and name != key:
                del container[key]
        else:
            container[key] = data.draw(TREES) if key != "dense" else None


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_random_manifests_stay_inside(template: Path, opened: Opened, data: st.DataObject) -> None:
    opened.active = False
    folder = template.parent / "fuzz"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder, symlinks=True)
    link = folder / "run" / "checkpoints" / LINK
    link.unlink()
    link.symlink_to(folder / OUTSIDE / "checkpoints")
    before = {path: path.stat().st_mtime_ns for path in (folder / OUTSIDE).rglob("*")}
    manifest = read(folder / "run")
    mutate(data, manifest, folder)
    write(folder / "run", manifest)
    opened.paths, opened.active = [], True
    read_only = data.draw(st.booleans())
    threads = torch.get_num_threads()
    try:
        with contextlib.closing(make_table()) as table:
            checkpoints = make_checkpoints(folder / "run", table, read_only=read_only)
            try:
                restored = checkpoints.restore()
                if restored is not None and not read_only:
                    checkpoints.save(2)
            finally:
                checkpoints.close()
    except tc.ThermoclineError:
        pass
    finally:
        torch.set_num_threads(threads)
    inspect(folder / "run", check=True, mem="16MB")
    opened.active = False
    assert opened.outside(folder / "run") == []
    assert {path: path.stat().st_mtime_ns for path in (folder / OUTSIDE).rglob("*")} == before


# ---- single cases


@pytest.fixture
def run_dir(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template / OUTSIDE, tmp_path / OUTSIDE)
    return Path(shutil.copytree(template / OUTSIDE, tmp_path / "run"))


def restore(run_dir: Path) -> Any:
    with contextlib.closing(make_table()) as table:
        checkpoints = make_checkpoints(run_dir, table, read_only=True)
        try:
            return checkpoints.restore()
        finally:
            checkpoints.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["files", "folder", "table"])
def test_names_with_a_path_are_refused(run_dir: Path, name: str, place: str) -> None:
    manifest = read(run_dir)
    if place == "files":
        manifest["files"] = dict.fromkeys([name], *manifest["files"].values())
    elif place == "folder":
        manifest["ranks"] = [{"stores": {"table": {"folder": name, "epoch": 2, "note": ""}}}]
    else:
        manifest["tables"][name] = manifest["tables"]["table"]
    write(run_dir, manifest)
    with pytest.raises(tc.FormatError, match="it must be the name of a file or folder, without a path"):
        restore(run_dir)
    assert "without a path" in inspect(run_dir)["problems"][0]


def test_symlinks_that_leave_the_folder_are_refused(run_dir: Path) -> None:
    (name,) = read(run_dir)["files"]
    inside, outside = run_dir / "checkpoints" / name, run_dir.parent / OUTSIDE / "checkpoints" / name
    inside.unlink()
    inside.symlink_to(outside)
    with pytest.raises(tc.FormatError, match=f"names '{name}', which is not in "):
        restore(run_dir)
    assert "which is not in" in inspect(run_dir, check=True)["problems"][0]
    inside.unlink()
    outside.rename(run_dir / "moved")
    inside.symlink_to("copy")
    (run_dir / "moved").rename(run_dir / "checkpoints" / "copy")  # a symlink inside of the folder is allowed
    assert restore(run_dir).step == 1


def test_rank_folder_that_is_a_symlink_is_refused(run_dir: Path) -> None:
    manifest = read(run_dir)
    table = manifest["tables"]["table"]
    manifest["ranks"] = [{"stores": {"table": {"folder": "rank-00000-of-00001", "epoch": 2, "note": table["note"]}}}]
    write(run_dir, manifest)
    (run_dir / "stores" / "table" / "rank-00000-of-00001").symlink_to(run_dir.parent / OUTSIDE / "stores" / "table")
    assert "which is not in" in inspect(run_dir)["problems"][0]


def test_store_elsewhere_must_be_of_this_run(tmp_path: Path) -> None:
    """`tiers.ssd` in the config of a run may lie outside of its folder, if the commits there name the run."""
    for name in ("own", "other"):
        write_run(tmp_path / name, ssd=tmp_path / f"{name}-store")
    config = tmp_path / "own" / "config.toml"
    config.write_text(f'tiers.ssd = "{tmp_path}/own-store"')
    report = inspect(tmp_path / "own", check=True)
    assert report["problems"] == []
    assert report["stores"][0]["keys"] == 5
    config.write_text(f'tiers.ssd = "{tmp_path}/other-store"')
    for path in (tmp_path / "own", manifest_path(tmp_path / "own")):
        report = inspect(path, check=True)
        assert "is not a store of this run: inspect it by its own path" in report["problems"][0]
        assert "keys" not in report["stores"][0]
    with contextlib.closing(make_table(ssd=tmp_path / "other-store", ssd_options={"read_only": True})) as table:
        checkpoints = make_checkpoints(tmp_path / "own", table, read_only=True)
        with pytest.raises(tc.FormatError, match="its epoch 2 is of another run"):
            checkpoints.restore()


@pytest.mark.parametrize("change", ["deep", "large", "pipe", "device", "ranks", "threads"])
def test_malformed_manifests(run_dir: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, manifest = manifest_path(run_dir), read(run_dir)
    if change in ("pipe", "device"):
        path.unlink()
        os.mkfifo(path) if change == "pipe" else path.symlink_to("/dev/zero")
    elif change == "deep":
        path.write_bytes(b"[" * 1_000_000)
    elif change == "large":
        monkeypatch.setattr("thermocline.checkpoint.manifest.MAX_TEXT_BYTES", 100)
    else:
        write(run_dir, {**manifest, **({"ranks": []} if change == "ranks" else {"torch_threads": 10**9})})
    with pytest.raises((tc.CorruptionError, tc.FormatError)):
        restore(run_dir)
    assert len(inspect(run_dir)["problems"]) == 1


def test_state_file_is_read_up_to_its_stated_size(run_dir: Path) -> None:
    (name,) = read(run_dir)["files"]
    os.truncate(run_dir / "checkpoints" / name, 1 << 40)  # sparse
    with pytest.raises(tc.CorruptionError, match="has 1099511627776 bytes: it must have at most"):
        restore(run_dir)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def claim_long_header(path: Path) -> None:
    path.write_bytes((1 << 39).to_bytes(8, "little"))
    os.truncate(path, 1 << 40)  # sparse


@pytest.mark.parametrize(
    ("damage", "text"),
    [(make_pipe, "is not a regular file"), (claim_long_header, "its header has 549755813888 bytes")],
)
def test_listing_checkpoints_reads_bounded_headers(run_dir: Path, damage: Any, text: str) -> None:
    """`Run.load` lists the checkpoints to find the best one, before any file is verified."""
    (name,) = read(run_dir)["files"]
    damage(run_dir / "checkpoints" / name)
    with contextlib.closing(make_table()) as table, pytest.raises(tc.CorruptionError, match=text):
        make_checkpoints(run_dir, table, read_only=True).saved()


@pytest.mark.parametrize("change", ["dtype", "tree"])
def test_state_file_with_a_valid_checksum_and_another_content(run_dir: Path, change: str) -> None:
    manifest = read(run_dir)
    (name,) = manifest["files"]
    path = run_dir / "checkpoints" / name
    tensors = {"a": torch.ones(2)}
    data = state_tree.encode(tensors, {"position": None, "extra": None, "state": {"dict": [["model", None, 3]]}})
    if change == "dtype":
        data = data.replace(b'"F32"', b'"F99"')
    path.write_bytes(data)
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write(run_dir, manifest)
    with pytest.raises(tc.FormatError):
        restore(run_dir)


def short_torch_state(values: Any) -> None:
    values["state"]["random"]["torch"] = torch.zeros(3, dtype=torch.uint8)


def short_python_state(values: Any) -> None:
    values["state"]["random"]["python"] = (3, (1, 2), None)


def no_numpy_state(values: Any) -> None:
    del values["state"]["random"]["numpy"]


def no_position(values: Any) -> None:
    del values["position"]


def learning_rate_as_text(values: Any) -> None:
    values["state"]["optimizers"][0]["state"]["param_groups"][0]["lr"] = "fast"


def momentum_of_another_shape(values: Any) -> None:
    values["state"]["optimizers"][0]["state"]["state"][0] = {"momentum_buffer": torch.zeros(9)}


def step_that_is_no_number(values: Any) -> None:
    values["state"]["optimizers"][0]["state"]["state"] = [1]


@pytest.mark.parametrize(
    "change",
    [
        short_torch_state, short_python_state, no_numpy_state, no_position, learning_rate_as_text,
        momentum_of_another_shape, step_that_is_no_number,
    ],
)  # fmt: skip
def test_a_malformed_state_raises_before_anything_changes(run_dir: Path, change: Any) -> None:
    """The state has a valid checksum. Rows, dense model, optimizer and random generators stay as they are."""
    manifest = read(run_dir)
    (name,) = manifest["files"]
    path = run_dir / "checkpoints" / name
    data = path.read_bytes()
    values = state_tree.values_of(data, name)
    values["state"] = state_tree.unpack(values["state"], state_tree.decode(data))
    change(values)
    tensors: state_tree.Tensors = {}
    values["state"] = state_tree.pack(values["state"], tensors, "dense")
    data = state_tree.encode(tensors, values)
    path.write_bytes(data)
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write(run_dir, manifest)
    with contextlib.closing(make_table()) as table:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        checkpoints = tc.Checkpoints(run_dir, [table], model, optimizer)
        keys = np.arange(5, dtype=np.uint64)

        def state() -> Any:
            tensors: state_tree.Tensors = {}
            own = [model.state_dict(), optimizer.state_dict(), state_tree.random_state()]
            packed = state_tree.pack(own, tensors, "")
            return (
                packed,
                {name: tensor.numpy().tobytes() for name, tensor in tensors.items()},
                table.read(keys).tobytes(),
            )

        before = state()
        with pytest.raises(tc.FormatError, match="has a state that this version cannot read"):
            checkpoints.restore()
        assert state() == before
        assert table.step_count == 0
        with pytest.raises(tc.ThermoclineError, match="call restore"):
            checkpoints.save(2)


def test_bounded_reads(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert untrusted_files.read_limited(path, 5) == b"12345"
    with pytest.raises(tc.CorruptionError, match="has 5 bytes: it must have at most 4"):
        untrusted_files.read_limited(path, 4)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fields": [1], "dense": [], "statistics": {}}', "[" * 100_000])
def test_malformed_features(tmp_path: Path, text: str) -> None:
    (tmp_path / "features.json").write_text(text)
    with pytest.raises(tc.CorruptionError, match=r"features\.json is damaged"):
        Features.load(tmp_path / "features.json")
