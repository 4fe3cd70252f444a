"""`is_in_part` has the hash of csrc/util/hash.h, in unsigned order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thermocline.embedding.key_hash import KeyPart, hash_keys
from thermocline.kernels import INTERPRETED
from thermocline.kernels.hash_part import is_in_part

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("parts", [1, 2, 3, 1000])
def test_each_key_is_in_its_part(parts: int) -> None:
    keys = np.random.default_rng(parts).integers(0, 2**64, 20_000, np.uint64)
    keys[:3] = 0, 2**63, 2**64 - 1
    hashes = hash_keys(keys)
    on_device = torch.from_numpy(keys.view(np.int64)).to(DEVICE)
    for number in {0, parts // 2, parts - 1}:
        part = KeyPart(number, parts)
        expected = (hashes >= np.uint64(part.lo)) & (hashes <= np.uint64(part.hi))
        assert is_in_part(on_device, part.lo, part.hi).cpu().numpy().tolist() == expected.tolist()
        assert expected.any()
