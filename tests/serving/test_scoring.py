"""Scores of the server against `thermocline predict` on the same rows at the same version."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import thermocline as tc
from thermocline import serving
from thermocline.cli.main import app
from thermocline.data.request_size import require_size
from thermocline.errors import CorruptionError, NotFoundError, ThermoclineError
from thermocline.serving import Publication, TableRows
from thermocline.serving.server import LookupServer
from thermocline.training import scoring
from thermocline.training.scoring import Scorer

ROWS = 400


def examples(seed: int, count: int = ROWS) -> pa.Table:
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 60, count), rng.integers(0, 40, count)
    price = rng.normal(size=count) * 3 + user % 5
    label = (rng.random(count) < 1 / (1 + np.exp(-(user % 7 - 3)))).astype(np.int64)
    at = np.arange(count) + 1000 * seed
    return pa.table({"label": label, "at": at, "user": [f"u{number}" for number in user], "item": item, "price": price})


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output + result.stderr
    return result.stdout


@pytest.fixture(params=["csv", "parquet"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    kind: str = request.param
    for name, seed in (("train", 0), ("test", 1)):
        if kind == "csv":
            pyarrow.csv.write_csv(examples(seed), f"{name}.csv")
        else:
            pq.write_table(examples(seed), f"{name}.parquet")
    Path("run.toml").write_text(
        f"""
[data]
train = ["train.{kind}"]
test = ["test.{kind}"]
time = "at"
numeric = ["price"]
numeric_features = {{ log = false }}
[model]
name = "dcnv2"
dim = 4
hidden = [16, 8]
[tiers]
mem = "8MB"
[train]
run_dir = "run"
batch_size = 100
lr = 0.05
epochs = 1
checkpoint_every = 2
keep = 10
"""
    )
    invoke("train", "run.toml")
    return kind


def predicted(kind: str, step: int) -> Any:
    options = ["--checkpoint", str(step), "--set", f"train.batch_size={ROWS}"]
    invoke("predict", "run", f"test.{kind}", "--out", f"scores-{step}.npy", *options)
    return np.load(f"scores-{step}.npy")


def test_scores_equal_those_of_predict_at_every_version(run: str) -> None:
    request = examples(1)
    invoke("export", "run", "--out", "served", "--checkpoint", "2")
    expected = {step: predicted(run, step) for step in (2, 4)}
    assert not np.array_equal(expected[2], expected[4])
    with (
        LookupServer("served", poll_seconds=0.05, scorer=Scorer("served")) as server,
        serving.connect(f"grpc://127.0.0.1:{server.port}", timeout=60) as client,
    ):
        assert client.score(request).tobytes() == expected[2].tobytes()  # bit for bit: the same batch
        parts = [client.score(request.slice(first, 100).drop(["label"])) for first in range(0, ROWS, 100)]
        assert np.abs(np.concatenate(parts) - expected[2]).max() <= 1e-6  # the size of a batch changes torch's bits
        invoke("export", "run", "--out", "served", "--delta", "--checkpoint", "4")
        server.snapshot.refresh()
        assert client.score(request.select(["price", "item", "user"])).tobytes() == expected[4].tobytes()
        with Publication("served") as publication:
            publication.compact()
        server.snapshot.refresh()
        assert client.score(request).tobytes() == expected[4].tobytes()
        assert client.score(request.slice(0, 0).combine_chunks()).shape == (0,)
        for bad, text in [
            (request.drop(["user"]), "lacks 'user'"),
            (request.append_column("more", request["item"]), "also has 'more'"),
            (request.set_column(4, "price", pa.array(["x"] * ROWS)), "column 'price' has type string"),
        ]:
            with pytest.raises(ThermoclineError, match=text):
                client.score(bad)
        text = client.action("metrics").decode()
        assert f"thermocline_scored_examples_total {float(4 * ROWS)}" in text
    with (
        LookupServer("served") as server,
        serving.connect(f"grpc://127.0.0.1:{server.port}") as client,
        pytest.raises(ThermoclineError, match="start it with --score"),
    ):
        client.score(request)
    files = {file.name for file in serving.open("served").version.files}
    assert files == {"config.toml", "features.json", "dense.safetensors"}
    folder = Path("served") / serving.open("served").version.folder
    assert str(Path.cwd()) not in (folder / "config.toml").read_text()
    dense = bytearray((folder / "dense.safetensors").read_bytes())
    dense[-1] ^= 1
    (folder / "dense.safetensors").write_bytes(dense)
    with pytest.raises(CorruptionError, match="is not the file that its manifest names"):
        Scorer("served").load(serving.open("served").state)


@pytest.mark.parametrize("precision", ['kind = "fp16"', 'kind = "int8", range = 2.0'])
def test_unseen_keys_of_runs_below_fp32_have_the_scores_of_predict(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = pa.table({"label": [0, 1] * 20, "user": [f"u{i}" for i in range(40)]})
    pq.write_table(table.slice(0, 20), "train.parquet")
    pq.write_table(table, "test.parquet")
    Path("run.toml").write_text(
        f"""
data = {{ train = ["train.parquet"] }}
model = {{ name = "dcnv2", dim = 4, hidden = [8], initial = 0.5 }}
precision = {{ {precision} }}
tiers = {{ mem = "8MB" }}
train = {{ run_dir = "run", batch_size = 20, seed = 3 }}
"""
    )
    invoke("train", "run.toml")
    invoke("predict", "run", "test.parquet", "--out", "scores.npy", "--set", "train.batch_size=40")
    invoke("export", "run", "--out", "served")
    scores = Scorer("served")(serving.open("served").state, table)
    assert len(set(scores[20:].tolist())) > 10
    assert scores.tobytes() == np.load("scores.npy").tobytes()


def publish_files(**changed: bytes) -> serving.Snapshot:
    """Publish the version of `served` again, with changed files."""
    state = serving.open("served").state
    folder = Path("served") / state.version.folder
    files = {file.name: (folder / file.name).read_bytes() for file in state.version.files}
    files |= {name.replace("__", "."): content for name, content in changed.items()}
    with Publication("served") as publication:
        (old,) = state.tables.values()
        keys = np.arange(0, dtype=np.uint64)
        rows = TableRows(name=old.name, dim=old.dim, rows=[(keys, np.zeros((0, old.dim), np.float32))])
        publication.publish_base([rows], step=10, files=files)
    return serving.open("served")


@pytest.mark.parametrize("run", ["parquet"], indirect=True)
def test_the_sizes_of_a_config_are_bounded_by_the_weights_before_any_is_allocated(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke("export", "run", "--out", "served")
    published = serving.open("served").version.folder
    text = (Path("served") / published / "config.toml").read_text()

    def load(**model: Any) -> None:
        config = tc.Config.parse(text)
        changed = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
        Scorer("served").load(publish_files(config__toml=changed.to_toml().encode()).state)

    load()
    for sizes in (
        {"hidden": (2 * 10**9, 2 * 10**9)},
        {"hidden": (2**62, 2**62)},
        {"hidden": (16, 9)},
        {"cross_layers": 10**9},
        {"attention_layers": 10**9},
    ):
        with pytest.raises(CorruptionError, match=r"dense\.safetensors does not have the sizes of config\.toml"):
            load(**sizes)
    with pytest.raises(CorruptionError, match=r"config\.toml has rows of 1000000001 weights, the version has 4"):
        load(name="deepfm", dim=10**9)
    load()
    monkeypatch.setitem(scoring._MAX_BYTES, "config.toml", 100)
    with pytest.raises(CorruptionError, match=r"config\.toml has \d+ bytes: it must have at most 100"):
        Scorer("served").load(serving.open("served").state)


def test_requests_are_bounded_by_their_size_after_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    def size(column: Any, separators: Any, max_ids: int = 1000, max_text: int = 1000) -> None:
        require_size(pa.table({"c": column}), separators, max_ids=max_ids, max_text=max_text)

    words = pa.array(["a^b^c"] * 10)
    for column in (words, words.dictionary_encode(), words.cast(pa.string_view()), words.cast(pa.large_binary())):
        size(column, {}, max_ids=10, max_text=50)
        size(column, {"c": "^"}, max_ids=30, max_text=50)
        with pytest.raises(ValueError, match="30 ids or more: at most 29; send several batches"):
            size(column, {"c": "^"}, max_ids=29)
        with pytest.raises(ValueError, match="50 bytes of text or more: at most 49"):
            size(column, {}, max_text=49)
    for column in (
        pa.array([[1, 2, 3], None, []]),
        pa.array([[1, 2, 3], None, []], pa.large_list(pa.int8())),
        pa.array([["x", "y", "z"], None, []]).slice(0, 3),
        pa.array([[1.0, 2.0, 3.0]], pa.list_(pa.float32(), 3)),
    ):
        size(column, {}, max_ids=3)
        with pytest.raises(ValueError, match="3 ids or more: at most 2"):
            size(column, {}, max_ids=2)
    with pytest.raises(ValueError, match="6 bytes of text"):
        size(pa.array([["ab", "cd"], ["ef"]]), {}, max_text=5)
    # A billion ids per row that take no bytes, and text that a dictionary repeats.
    nulls = pa.FixedSizeListArray.from_arrays(pa.nulls(2 * 10**9), 10**9)
    with pytest.raises(ValueError, match="2000000000 ids or more"):
        size(nulls, {}, max_ids=scoring.MAX_IDS)
    text = pa.DictionaryArray.from_arrays(pa.array([0, None] * 30_000), pa.array(["x" * 100_000]))
    with pytest.raises(ValueError, match="3000000000 bytes of text"):
        size(text, {"c": "^"}, max_ids=scoring.MAX_IDS, max_text=scoring.MAX_TEXT)
    # Entries that no row names, which conversion reads, too.
    entries = views_of_one_text(100_000, 100)
    with pytest.raises(ValueError, match="10000000 bytes of text in dictionaries or more: at most 1000"):
        size(pa.DictionaryArray.from_arrays(pa.array([0]), entries), {"c": "^"}, max_ids=10**6)
    with pytest.raises(ValueError, match="1000000 entries of dictionaries"):
        size(pa.DictionaryArray.from_arrays(pa.array([0]), pa.nulls(10**6)), {})
    # The length of a null is not checked by Arrow.
    with pytest.raises(ValueError, match="1200 bytes of text"):
        size(views_of_one_text(13, 100, null_length=-(2**31)), {})


def views_of_one_text(count: int, length: int, null_length: int | None = None) -> Any:
    """Return an Arrow array of views of the same text; the last one is null if it has a length of its own."""
    views = np.zeros((count, 4), np.int32)
    views[:, 0], views[:, 1] = length, int.from_bytes(b"xxxx", "little")
    valid = None
    if null_length is not None:
        views[-1] = null_length, 0, 0, 0
        bits = np.packbits(np.arange(count) < count - 1, bitorder="little")
        valid = pa.py_buffer(bits.tobytes())
    buffers = [valid, pa.py_buffer(views.tobytes()), pa.py_buffer(b"x" * length)]
    array = pa.Array.from_buffers(pa.string_view(), count, buffers)
    array.validate(full=True)
    return array


@pytest.mark.parametrize("run", ["parquet"], indirect=True)
def test_a_request_with_too_many_ids_fails_alone(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("export", "run", "--out", "served")
    monkeypatch.setattr(scoring, "MAX_IDS", 4 * ROWS - 1)  # three columns are used, and the label
    with (
        LookupServer("served", scorer=Scorer("served")) as server,
        serving.connect(f"grpc://127.0.0.1:{server.port}", timeout=60) as client,
    ):
        request = examples(1).drop(["at"])
        with pytest.raises(ThermoclineError, match=f"{4 * ROWS} ids or more: at most {4 * ROWS - 1}; send several"):
            client.score(request)
        assert len(client.score(request.slice(0, 100))) == 100


def test_a_version_without_a_dense_model_is_reported(tmp_path: Path) -> None:
    with Publication(tmp_path / "served") as publication:
        publication.publish_base([TableRows(name="t", dim=2, rows=[])], step=0)
        with pytest.raises(ValueError, match="it must be a file name"):
            publication.publish_base([TableRows(name="t", dim=2, rows=[])], step=0, files={"../x": b""})
    with pytest.raises(NotFoundError, match="has no dense model"):
        LookupServer(tmp_path / "served", scorer=Scorer(tmp_path / "served"))
    result = CliRunner().invoke(app, ["serve", str(tmp_path / "served"), "--score"])
    assert result.exit_code == 2
    assert "has no dense model" in result.stderr


def test_criteo_columns_are_converted_as_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from thermocline.data.features import criteo_columns
    from thermocline.data.record_batches import RecordBatchConverter

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    names = criteo_columns(True)
    lines = []
    for _ in range(50):
        numbers = [str(rng.integers(-2, 1000)) if rng.random() < 0.8 else "" for _ in range(13)]
        values = [f"{rng.integers(0, 2**32):08x}" if rng.random() < 0.8 else "" for _ in range(26)]
        lines.append([str(rng.integers(0, 2)), *numbers, *values])
    Path("day").write_text("".join("\t".join(line) + "\n" for line in lines))
    reader = tc.Reader("day", format="criteo", batch_size=100, tensors=False)
    (expected,) = list(reader)
    columns: dict[str, Any] = {}
    for i, name in enumerate(names[1:], 1):
        values = [line[i] or None for line in lines]
        columns[name] = pa.array([v and int(v) for v in values]) if name[0] == "I" else pa.array(values, pa.string())
    batch = RecordBatchConverter(reader.data, reader.features).batch(pa.table(columns))
    assert batch.ids.tolist() == expected.ids.tolist()
    assert batch.offsets.tolist() == expected.offsets.tolist()
