"""Logic of lookahead.py, ssd_billion.py and warm_rows.py at small sizes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import thermocline as tc
from thermocline.embedding.key_hash import hash_keys, mix64

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a benchmark by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


# ---- lookahead.py


def test_both_sides_train_and_processor_time_is_recorded(load: Any, tmp_path: Path) -> None:
    import torch

    threads = torch.get_num_threads()
    load("lookahead").main(["--quick", "--only", "linear", "--folder", str(tmp_path), "--json", str(tmp_path / "j")])
    torch.set_num_threads(threads)
    record = json.loads((tmp_path / "j").read_text())
    summary = record["summary"]["linear"]
    for side in ("memory", "ssd"):
        assert summary[side]["examples_per_second"]["median"] > 0
        assert summary[side]["cpu_ms_per_step"]["median"] > 0
    assert summary["memory"]["kb_per_example"]["median"] == 0
    assert summary["ssd"]["kb_per_example"]["median"] > 0
    assert summary["ssd"]["horizon"] > 0
    assert summary["cold"]["examples_per_second"] > 0
    assert [claim["target"] for claim in record["claims"]] == [0.7, 1.0]


def test_the_claims_compare_medians(load: Any) -> None:
    def lap(rate: float, counted: float = 0.5) -> dict[str, Any]:
        steady = {"cpu_seconds": 2.0, "batches": 100, "examples": 1000, "bytes_read": 5000}
        memory = {"counted": counted, "budget": 1.0}
        return {"examples_per_s": rate, "steady": steady, "horizon": 9, "ramp_seconds": 1.0, "memory": memory}

    def claims(ssd: list[float], counted: float = 0.5, others: float = 0.05) -> list[Any]:
        laps = [lap(rate, counted) for rate in ssd]
        result = {"memory": [lap(100.0)], "ssd": laps, "cold": lap(1), "others_cpu": others}
        out: list[Any] = load("lookahead").claims_of({"dnn": result})
        return out

    def met(ssd: list[float], **changes: float) -> list[bool]:
        return [claim.met for claim in claims(ssd, **changes)]

    assert met([91.0, 92.0, 10.0]) == [True, True]
    assert met([89.0, 92.0, 10.0]) == [False, True]
    assert met([95.0], counted=1.01) == [True, False]
    assert met([95.0], others=0.051) == [False, True]  # the time is not valid, the memory is
    assert not claims([95.0], others=0.051)[0].valid
    assert "20.0 and 20.0 ms of processor time per step" in claims([95.0])[0].detail


# ---- ssd_billion.py


def test_keys_are_distinct_and_in_hash_order(load: Any) -> None:
    module = load("ssd_billion")
    values = np.random.default_rng(1).integers(0, 2**64, 1000, dtype=np.uint64)
    assert (module.unmix64(mix64(values)) == values).all()
    keys = module.Keys(100_000)
    hashes = hash_keys(keys(np.arange(100_000)))
    assert (np.diff(hashes.astype(np.float64)) >= 0).all()
    assert len(np.unique(hashes)) == 100_000
    gaps = np.diff(hashes.astype(np.float64)) / (2**64 / 100_000)
    assert gaps.std() > 0.3  # jittered: rows per page vary as for random keys
    large = module.Keys(10**9)
    last = np.arange(10**9 - 1000, 10**9)
    assert (hash_keys(large(last))[1:] > hash_keys(large(last))[:-1]).all()


def test_a_store_is_built_with_a_log_and_measured(load: Any, tmp_path: Path) -> None:
    module = load("ssd_billion")
    engines = load("engines")
    keys, data = module.Keys(200_000), engines.Data(200_000, module.ROW_BYTES)
    built = module.build(tmp_path, keys, data)
    assert built.complete
    assert built.put >= module.LOG_FILL * module.LOG_RATIO * 200_000 * 0.5
    result = module.measure(tmp_path / "rows", keys, data, rounds=1, batch=5000)
    assert result["disk_bytes"] > 200_000 * 24
    assert not result["filter_given_up"]
    assert result["log_share"] > 0.5
    with tc.SsdStore.open(tmp_path / "rows") as store:
        assert len(store) == 200_000
        found, rows = store.get(keys(np.arange(0, 200_000, 7)))
    assert found.all()
    data.check(keys(np.arange(0, 200_000, 7)), rows)
    names = [claim.name for claim in module.claims_of(result)]
    assert names == ["time to open", "DRAM per key", "get, share of the floor"]


def test_a_store_built_in_parts_has_all_rows(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("ssd_billion")
    monkeypatch.setattr(module, "PIECE", 5000)
    monkeypatch.setattr(module, "ROUNDS", 1)
    command = ["--keys", "40000", "--folder", str(tmp_path)]
    module.main([*command, "--step", "build", "--minutes", "0"])
    built = module.Built.of(tmp_path / "ssd-billion", 40_000)
    assert built.loaded == 5000
    with pytest.raises(SystemExit, match="no complete store of 40,000 keys"):
        module.main([*command, "--step", "measure"])
    with pytest.raises(SystemExit, match="a store of 40,000 keys, not of 50,000"):
        module.main(["--keys", "50000", "--folder", str(tmp_path), "--step", "build"])
    for _ in range(100):
        module.main([*command, "--step", "build", "--minutes", "0"])
        if module.Built.of(tmp_path / "ssd-billion", 40_000).complete:
            break
    with tc.SsdStore.open(tmp_path / "ssd-billion" / "rows") as store:
        assert len(store) == 40_000
        wanted = module.Keys(40_000)(np.arange(40_000))
        found, rows = store.get(wanted)
        assert found.all()
        load("engines").Data(40_000, module.ROW_BYTES).check(wanted, rows)
    module.main([*command, "--step", "measure", "--json", str(tmp_path / "out.json")])
    assert not (tmp_path / "ssd-billion").exists()
    assert (tmp_path / "out.json").exists()


# ---- warm_rows.py


def test_a_warm_run_is_dense_if_the_same_rows_return(load: Any) -> None:
    """A tenth of the rows is used in every other horizon: together they fill a tenth of the pages."""
    module = load("warm_rows")
    rng = np.random.default_rng(3)
    returning = np.sort(rng.choice(50_000, 5_000, replace=False))
    once = np.setdiff1d(np.arange(50_000), returning)

    def horizons() -> Any:
        for _ in range(200):
            yield returning
            yield np.sort(rng.choice(once, 3_000, replace=False))

    counts = module.simulate(horizons(), 50_000, 50, 0.0, (module.HASH, 1, 4), 20)
    assert counts.horizons == 20
    hashed, warm = module.figures(counts, 1), module.figures(counts, 4)
    assert hashed["pages_hash"] > 700  # of 1,000 pages
    assert warm["factor"] > 1.2
    assert 0 < warm["warm_rows"] < 1


def test_uniform_rows_gain_nothing(load: Any) -> None:
    module = load("warm_rows")
    rng = np.random.default_rng(3)
    horizons = (np.sort(rng.choice(20_000, 2_000, replace=False)) for _ in range(400))
    counts = module.simulate(horizons, 20_000, 50, 0.1, (module.HASH, 2), 10)
    assert 0.9 < module.figures(counts, 2)["factor"] < 1.1


def test_pages_hold_all_rows_of_both_runs(load: Any) -> None:
    store = load("warm_rows").Store(1000, 10, keep=2)
    assert store.pages(np.arange(1000)) == 100
    store.merge(np.arange(0, 1000, 20), np.zeros(1000))
    assert store.warm.sum() == 50
    assert store.pages(np.arange(0, 1000, 20)) == 5  # their own pages
    assert store.pages(np.arange(1000)) == 100
    for _ in range(2):
        store.merge(np.empty(0, np.int64), np.zeros(1000))
    assert not store.warm.any()


def test_movielens_is_read_in_the_order_of_time(load: Any, tmp_path: Path) -> None:
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float", "1\t7\t3\t900000000", "2\t8\t4\t800000000"]
    (tmp_path / "ml-100k.inter").write_text("\n".join(lines) + "\n")
    horizons, rows = load("warm_rows").movielens_trace(tmp_path, 0.5)
    first, second = next(horizons), next(horizons)
    assert rows == 18
    assert len(first) == len(second) == 9
    again = next(horizons)
    assert (again == first).all()
