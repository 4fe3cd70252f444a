"""Models A to E of "Distributed Hierarchical GPU Parameter Server" (Zhao et al., MLSys 2020), at any scale."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re


@dataclasses.dataclass(frozen=True, slots=True)
class _Published:
    """A model as published. The paper gives no number of fields: `fields` is our choice."""

    nonzeros: int
    keys: int
    dense_parameters: int
    model_bytes: int
    fields: int


_MODELS = {
    "A": _Published(100, 8 * 10**9, 700_000, 300 * 10**9, 25),
    "B": _Published(100, 2 * 10**10, 20_000, 600 * 10**9, 25),
    "C": _Published(500, 6 * 10**10, 2_000_000, 2000 * 10**9, 50),
    "D": _Published(500, 10**11, 4_000_000, 6000 * 10**9, 50),
    "E": _Published(500, 2 * 10**11, 7_000_000, 10_000 * 10**9, 50),
}
# The cluster of Zhao et al. (2020): 4 nodes with 8 GPUs of 32 GB and about 1 TB of DRAM each: 10 % and 40 % of model E.
_HBM_BYTES = 4 * 8 * 32 * 10**9
_MEM_BYTES = 4 * 10**12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """A published model divided by `scale`: keys, bytes and budgets are scaled, sizes per example are not."""

    name: str
    scale: float
    nonzeros: int
    """Ids per example."""
    fields: int
    keys: int
    dim: int
    """Weights per row: with one float of optimizer state (row-wise Adagrad) a row has the paper's bytes per key."""
    hidden: tuple[int, ...]
    """Widths of an MLP with `dense_parameters` (fields * dim inputs, one output)."""
    dense_parameters: int
    """Published value, not scaled."""
    model_bytes: int
    mem: int
    """Bytes of DRAM of the paper's cluster, scaled."""
    hbm: int
    """Bytes of GPU memory of the paper's cluster, scaled."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with row-wise Adagrad."""
        return 4 * (self.dim + 1)

    @classmethod
    def parse(cls, name: str) -> PaperModel:
        """Parse "E", "E/1000" or "e/2.5e3"."""
        match = re.fullmatch(r"\s*([A-Za-z])\s*(?:/\s*([0-9.eE+_]+))?\s*", name) if isinstance(name, str) else None
        model = _MODELS.get(match[1].upper()) if match else None
        if match is None or model is None:
            raise ValueError(
                f'unknown preset {name!r}: write one of {", ".join(_MODELS)}, alone or with a divisor, such as "E/1000"'
            )
        try:
            scale = float(match[2] or 1)
        except ValueError:
            scale = math.nan
        if not 1 <= scale < math.inf:
            raise ValueError(f"preset {name!r}: the divisor after '/' must be at least 1")
        dim = math.floor(model.model_bytes / model.keys / 4 + 0.5) - 1
        return cls(
            name=match[1].upper(),
            scale=scale,
            nonzeros=model.nonzeros,
            fields=model.fields,
            keys=round(model.keys / scale),
            dim=dim,
            hidden=hidden_sizes(model.fields * dim, model.dense_parameters),
            dense_parameters=model.dense_parameters,
            model_bytes=round(model.model_bytes / scale),
            mem=round(_MEM_BYTES / scale),
            hbm=round(_HBM_BYTES / scale),
        )


def mlp_parameters(inputs: int, hidden: tuple[int, ...]) -> int:
    """Count the weights and biases of an MLP with one output."""
    widths = (inputs, *hidden, 1)
    return sum((a + 1) * b for a, b in itertools.pairwise(widths))


def hidden_sizes(inputs: int, parameters: int, layers: int = 3) -> tuple[int, ...]:
    """Return `layers` equal widths for which the MLP's parameter count is closest to `parameters`."""
    width = 1
    while mlp_parameters(inputs, (width + 1,) * layers) <= parameters:
        width += 1
    near = min((width, width + 1), key=lambda w: abs(mlp_parameters(inputs, (w,) * layers) - parameters))
    return (near,) * layers
