"""Trains the same models on TorchRec and on thermocline.torchrec, and compares the losses of every step.

    python benchmarks/torchrec_losses.py [--steps 50] [--json FILE]

Needs torchrec 1.8.0 in the environment (docs/benchmarks/torchrec.md has the commands). Without it, `--reference torch`
compares with nn.EmbeddingBag and nn.Embedding of torch, one per table.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

import thermocline as tc
import thermocline.torchrec as ours

Reference = Literal["torchrec", "torch"]
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}
ROWS: dict[str, tuple[type[Any], dict[str, Any]]] = OPTIMIZERS | {"adam": (tc.Adam, {"lr": 0.01, "lazy": "catch_up"})}
"""Our optimizers. Adam of torch changes all rows in every step, also those that are not in the batch."""
BOUNDS = {"sgd": 1e-6, "adagrad": 1e-6, "adam": 1e-5}
"""Largest accepted difference of the losses of one step."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A collection and its data."""

    name: str
    tables: tuple[tuple[int, int, tuple[str, ...], str], ...]
    """num_embeddings, embedding_dim, features and pooling of each table."""
    batch: int = 32
    lengths: tuple[int, int] = (0, 4)
    """Fewest and most ids of a bag."""
    weighted: bool = False
    learned: bool = False
    """Weights are computed by a parameter and get gradients."""
    dtype: torch.dtype = torch.int64
    pooled: bool = True
    extra: tuple[str, ...] = ()
    """Features in the data that no table reads."""

    def features(self) -> list[str]:
        """Return all features of the data, in reverse order of their use."""
        return [*self.extra, *reversed(list(dict.fromkeys(f for _, _, names, _ in self.tables for f in names)))]


def _one(n: int, dim: int, pooling: str = "SUM", features: tuple[str, ...] = ("a",)) -> Any:
    return ((n, dim, features, pooling),)


def _many(count: int, pooling: str, dim: int = 8) -> Any:
    return tuple((20 + 7 * i, dim, (f"f{i}",), pooling) for i in range(count))


_MIXED = ((50, 4, ("a", "b"), "SUM"), (30, 16, ("c",), "MEAN"), (7, 9, ("d",), "SUM"))
_SHARED_FEATURE = ((40, 8, ("a", "b"), "SUM"), (60, 8, ("b", "c"), "MEAN"))
CASES = [
    Case("one table", _one(100, 8)),
    Case("one table, mean", _one(100, 8, "MEAN")),
    Case("dim 1", _one(30, 1)),
    Case("dim 33", _one(30, 33, "MEAN")),
    Case("one id per bag", _many(6, "SUM"), lengths=(1, 1)),
    Case("empty bags", _many(3, "MEAN"), lengths=(0, 1)),
    Case("long bags", _one(500, 8), lengths=(50, 120)),
    Case("long bags, mean", _one(500, 8, "MEAN"), lengths=(50, 120)),
    Case("repeated ids", _one(3, 8), lengths=(3, 9)),
    Case("shared table", _one(80, 8, features=("a", "b", "c"))),
    Case("feature of two tables", _SHARED_FEATURE),
    Case("mixed dims and poolings", _MIXED),
    Case("26 tables", _many(26, "SUM", 4)),
    Case("int32 ids", _MIXED, dtype=torch.int32),
    Case("unused features", _MIXED, extra=("x", "y")),
    Case("weighted", _many(3, "SUM"), weighted=True),
    Case("weighted, shared table", _one(80, 8, features=("a", "b")), weighted=True),
    Case("learned weights", _many(3, "SUM"), weighted=True, learned=True),
    Case("sequences", tuple((30, 8, (f,), "SUM") for f in "ab"), pooled=False),
    Case("sequences, shared table", _one(30, 8, features=("a", "b")), pooled=False, dtype=torch.int32),
]


class Model(torch.nn.Module):
    """A collection, the sum of sequences, and a perceptron."""

    def __init__(self, collection: torch.nn.Module, case: Case, library: Any) -> None:
        super().__init__()
        self.collection, self._case, self._library = collection, case, library
        width = sum(dim * len(features) for _, dim, features, _ in case.tables)
        torch.manual_seed(1)
        self.dense = torch.nn.Sequential(torch.nn.Linear(width, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, data: dict[str, Any]) -> torch.Tensor:
        weights = data["weights"]
        if self._case.learned:
            weights = weights * self.scale[torch.arange(len(weights)) % 5]
        features = self._library.KeyedJaggedTensor(data["keys"], data["values"], weights, lengths=data["lengths"])
        out = self.collection(features)
        if self._case.pooled:
            names = sorted(out.keys())
            (x,) = self._library.KeyedTensor.regroup([out], [names])
        else:
            x = torch.cat([part.to_padded_dense(4).sum(1) for part in out.values()], 1)
        loss: torch.Tensor = torch.nn.functional.binary_cross_entropy_with_logits(self.dense(x)[:, 0], data["label"])
        return loss


def batches(case: Case, steps: int) -> Iterator[dict[str, Any]]:
    """Yield random data, the same for every call."""
    rng = torch.Generator().manual_seed(0)
    sizes = {f: n for n, _, names, _ in reversed(case.tables) for f in names}
    for names in (names for _, _, names, _ in case.tables):
        for f in names:  # a feature of two tables has the ids of the smaller
            sizes[f] = min(n for n, _, features, _ in case.tables if f in features)
    keys = case.features()
    for _ in range(steps):
        low, high = case.lengths
        lengths = torch.randint(low, high + 1, (len(keys) * case.batch,), generator=rng)
        values = []
        for i, key in enumerate(keys):
            count = int(lengths[i * case.batch : (i + 1) * case.batch].sum())
            values.append(torch.randint(0, sizes.get(key, 1000), (count,), generator=rng))
        joined = torch.cat(values).to(case.dtype)
        yield {
            "keys": keys,
            "values": joined,
            "lengths": lengths.to(case.dtype),
            "weights": torch.rand(len(joined), generator=rng) + 0.5 if case.weighted else None,
            "label": torch.randint(0, 2, (case.batch,), generator=rng).float(),
        }


def configs(case: Case, library: Any) -> list[Any]:
    """Return the configs of a case, of TorchRec or of thermocline.torchrec."""
    made = []
    for i, (n, dim, features, pooling) in enumerate(case.tables):
        more = {"pooling": getattr(library.PoolingType, pooling)} if case.pooled else {}
        kind = library.EmbeddingBagConfig if case.pooled else library.EmbeddingConfig
        made.append(kind(num_embeddings=n, embedding_dim=dim, name=f"t{i}", feature_names=list(features), **more))
    return made


def collection_of(case: Case, library: Any) -> Any:
    """Return the collection of a case."""
    if case.pooled:
        return library.EmbeddingBagCollection(configs(case, library), is_weighted=case.weighted)
    return library.EmbeddingCollection(configs(case, library))


class TorchCollection(torch.nn.Module):
    """The computation of TorchRec's unsharded collections by nn.EmbeddingBag and nn.Embedding, one per table."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case, self._configs = case, configs(case, ours)
        modules = {}
        for config in self._configs:
            size = config.num_embeddings, config.embedding_dim
            mode = config.pooling.name.lower() if case.pooled else ""
            modules[config.name] = (
                torch.nn.EmbeddingBag(*size, mode=mode, include_last_offset=True)
                if case.pooled
                else torch.nn.Embedding(*size)
            )
            bound = config.num_embeddings**-0.5
            torch.nn.init.uniform_(modules[config.name].weight, -bound, bound)  # type: ignore[arg-type]
        self.add_module("embedding_bags" if case.pooled else "embeddings", torch.nn.ModuleDict(modules))
        self._tables = modules

    def forward(self, features: Any) -> Any:
        parts, out = features.to_dict(), {}
        used = [feature for config in self._configs for feature in config.feature_names]
        for config in self._configs:
            for feature in config.feature_names:
                part, name = parts[feature], f"{feature}@{config.name}" if used.count(feature) > 1 else feature
                if self._case.pooled:
                    weights = part.weights() if self._case.weighted else None
                    out[name] = self._tables[config.name](part.values(), part.offsets(), weights)
                else:
                    vectors = self._tables[config.name](part.values())
                    out[name] = ours.JaggedTensor(vectors, lengths=part.lengths())
        return ours.KeyedTensor.from_tensor_list(list(out), list(out.values())) if self._case.pooled else out


def losses(case: Case, optimizer: str, reference: Reference, steps: int) -> tuple[list[float], list[float]]:
    """Return the losses of every step, of the reference and of thermocline.torchrec, from the same initial rows."""
    kind, options = OPTIMIZERS[optimizer]
    torch.manual_seed(0)
    if reference == "torchrec":
        import torchrec
        from torchrec.modules.embedding_configs import PoolingType

        library: Any = _Names(torchrec, PoolingType=PoolingType)
        first = Model(collection_of(case, library), case, library)
    else:
        first = Model(TorchCollection(case), case, ours)
    second = Model(collection_of(case, ours), case, ours)
    ours.apply_optimizer_in_backward(ROWS[optimizer][0], second.collection.parameters(), ROWS[optimizer][1])
    second.load_state_dict(first.state_dict())  # the rows of TorchRec
    return _train(first, case, steps, kind(first.collection.parameters(), **options)), _train(second, case, steps)


class _Names:
    """The names of a module, and some more."""

    def __init__(self, module: Any, **more: Any) -> None:
        self._module = module
        self.__dict__.update(more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _train(model: Model, case: Case, steps: int, *more: torch.optim.Optimizer) -> list[float]:
    optimizers = [torch.optim.SGD([*model.dense.parameters(), model.scale], lr=0.05), *more]
    seen = []
    for data in batches(case, steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(data)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        seen.append(loss.item())
    return seen


def largest_difference(case: Case, optimizer: str, reference: Reference, steps: int) -> float:
    """Return the largest difference between the losses of one step."""
    first, second = losses(case, optimizer, reference, steps)
    if first[0] == first[-1]:
        raise AssertionError(f"{case.name}: the loss does not change")
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def main() -> None:
    """Print the largest difference of each case and optimizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=50)
    installed = importlib.util.find_spec("torchrec") is not None
    parser.add_argument("--reference", choices=["torchrec", "torch"], default="torchrec" if installed else "torch")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    print(f"reference {options.reference}, {options.steps} steps: largest difference of the losses of one step")
    print(f"| case | {' | '.join(OPTIMIZERS)} |")
    print("|---|" + "---|" * len(OPTIMIZERS))
    for case in CASES:
        found = {name: largest_difference(case, name, options.reference, options.steps) for name in OPTIMIZERS}
        print(f"| {case.name} | {' | '.join(f'{value:.1e}' for value in found.values())} |", flush=True)
        results[case.name] = found
    if options.json is not None:
        from common import Claim, environment, write_json  # in the folder of the script

        largest = {name: max(found[name] for found in results.values()) for name in OPTIMIZERS}
        claims = [Claim(f"losses, {name}", largest[name], BOUNDS[name], "", at_most=True) for name in OPTIMIZERS]
        packages = ["torch", "torchrec", "fbgemm-gpu-cpu"]
        sizes = {"steps": options.steps, "reference": options.reference, "cases": len(CASES)}
        write_json(options.json, {"environment": environment(packages), "sizes": sizes, "results": results}, claims)


if __name__ == "__main__":
    main()
