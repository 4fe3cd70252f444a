"""Use the package without torch, and print a digest of its results: equal for every build and every Python.

wheel_check.py FOLDER, the folder that the package must be in: wheels.py runs it in new environments, outside of the
source tree, with every instruction set of the kernels. Covers the parsers, the generated data, rows and optimizers of
the DRAM tier, and the store.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

import numpy as np

import thermocline as tc

CSV = """label,price,tags,seen_at,text
1,3.5,a|b,2026-01-05 10:03:00,"two
lines"
0,,c,2026-07-31T23:59:59Z,one
1,1e-7,,1700000000,"a ""quote"" here"
"""


def batches_of(reader: object, digest: hashlib._Hash) -> None:
    for batch in reader:  # type: ignore[attr-defined]
        for array in (batch.ids, batch.offsets, batch.dense, batch.label):
            if array is not None:
                digest.update(np.ascontiguousarray(array).tobytes())


def main() -> None:
    assert Path(tc.__file__).is_relative_to(sys.argv[1]), f"{tc.__file__} is not in {sys.argv[1]}"
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        path.write_text(CSV)
        options = {"separators": {"tags": "|"}, "time_buckets": {"seen_at": "hour_of_week"}, "numeric": "price"}
        batches_of(tc.Reader(path, batch_size=2, tensors=False, **options), digest)
        ads = tc.SyntheticAds(keys=5000, fields=5, dense=2, batch_size=256, examples=2048, tensors=False)
        batches_of(ads, digest)
        store = tc.SsdStore.open(Path(folder) / "store", row_bytes=8 * 6, mem_budget="16MB")
        with store:
            for optimizer in (tc.SGD(lr=0.1), tc.Adagrad(lr=0.1), tc.Adam(lr=0.01)):
                tier = tc.DramTier(6, optimizer, budget="8MB", seed=3)
                rng = np.random.default_rng(7)
                for step in range(1, 6):
                    keys = np.unique(rng.zipf(1.3, 900).astype(np.uint64))
                    slots = tier.pull(keys)
                    digest.update(np.ascontiguousarray(tier.rows(slots)).tobytes())
                    grads = rng.standard_normal((len(keys), 6), np.float32)
                    tier.apply_gradients(slots, grads, step=step)
                    digest.update(np.ascontiguousarray(tier.rows(slots)).tobytes())
                    tier.unpin(slots, dirty=True)
            store.put(np.arange(500, dtype=np.uint64), np.arange(500 * 48, dtype=np.uint8).reshape(500, 48))
            assert store.commit() == 1
            digest.update(store.get(np.arange(500, dtype=np.uint64))[1].tobytes())
    assert "torch" not in sys.modules, "the check must run without torch"
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
