"""Tables 1 and 2 of Zhao (2026): logistic regression, a network, and the network over hashed features for several k."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import paper
from experiments.experiment import (
    MARKS,
    Claim,
    Experiment,
    Figure,
    Json,
    Section,
    Series,
    Setup,
    Step,
    StepContext,
    Table,
    config_settings,
)
from thermocline.config.data import Data, Hashing, Synth
from thermocline.config.model import ModelConfig
from thermocline.config.schema import Config, Tiers, Train

FIELDS, NONZEROS, ZIPF, DIM, HIDDEN = 24, 48, 1.25, 8, (64, 32)
BATCH = {"cpu": 512, "cuda": 8192}
TEST = 100_000
EXAMPLES = {"image": 1_000_000, "web": 2_000_000}
"""Training examples of the full run on a CPU, per data set."""
GPU_EXAMPLES = 20_000_000
"""Training examples of the full run on a GPU, of either data set."""
DIVISOR = {"cpu": 1e5, "cuda": 1e3}
"""Divisor of the weights of Zhao (2026) and of its k in the full run."""
LEAST_BINS = 50
"""Bins per nonzero of an example from which on the paper's order of all methods is claimed. With fewer, the popular
keys of one example collide with each other."""
METHODS = {
    "op_osrp": "OP+OSRP",
    "per_field": "OP+OSRP, per field",
    "modulo": "modulo 2k",
    "count_sketch": "count-sketch",
}
HASHES = {"image": 3, "web": 12}
"""Hash functions per AUC of OP+OSRP in the full run. Collisions of popular keys are random and change an AUC by more
than halving k does; on the web data, whose k are small, the standard deviation is 0.015."""
NOISE = 0.001
"""A smaller rise of AUC between k and k / 2 is chance, given 100,000 test examples."""


def divisor(setup: Setup) -> float:
    """Return the divisor of the paper's weights and of its k; a short run needs fewer keys to learn them."""
    return DIVISOR[setup.device] if setup.effort >= 0.5 else 1e6


def examples(setup: Setup, dataset: str) -> int:
    """Return the number of training examples; a short run has three times its share of the smaller data set."""
    if setup.device == "cuda" and setup.effort >= 0.5:
        return GPU_EXAMPLES
    full = EXAMPLES[dataset] if setup.effort >= 0.5 else EXAMPLES["image"]
    return min(full, setup.count(3 * full, 4 * BATCH["cpu"]))


def _rows(setup: Setup, dataset: str) -> list[tuple[str, str, int | None]]:
    """Return (method, name, log2 of the paper's k) of every row of the table."""
    rows: list[tuple[str, str, int | None]] = [("lr", "LR", None), ("dnn", "DNN", None)]
    published = [row["log2_k"] for row in paper.load()["hashing"][dataset]["hash"]]
    thorough = setup.effort >= 0.5
    chosen = published if thorough else published[::4]
    others = published[:: 5 if setup.device == "cuda" else 3] if thorough else chosen[1:2]
    for method, name in METHODS.items():
        for log2_k in chosen if method == "op_osrp" else others:
            rows.append((method, f"{name}, k = 2^{log2_k}", log2_k))
    return rows


def bins(setup: Setup, log2_k: int) -> int:
    """Return the scaled k."""
    return max(1, round((1 << log2_k) / divisor(setup)))


def hashes(setup: Setup, dataset: str, method: str) -> int:
    """Return the number of hash functions, each a training, of one row. With many bins, one is enough."""
    several = setup.effort >= 0.5 and setup.device == "cpu" and method == "op_osrp"
    return HASHES[dataset] if several else 1


def bins_per_nonzero(setup: Setup, dataset: str) -> float:
    """Return the bins of the smallest k per nonzero of an example."""
    return min(bins(setup, row["log2_k"]) for row in paper.load()["hashing"][dataset]["hash"]) / NONZEROS


def config(setup: Setup, dataset: str, method: str, k: int | None, number: int = 0) -> Config:
    """Configure the training of one row with one hash function, as for `thermocline train`."""
    keys = round(paper.load()["hashing"][dataset]["lr"]["weights"] / divisor(setup))
    count = examples(setup, dataset)
    synth = Synth(
        keys=max(keys, FIELDS * 100), fields=FIELDS, nonzeros=NONZEROS, zipf=ZIPF, seed=setup.seed,
        examples=count, valid_examples=0, test_examples=min(TEST, count),
    )  # fmt: skip
    hashing = None
    if k is not None:
        kinds: dict[str, dict[str, Any]] = {
            "per_field": {"fields": "per_field"},
            "modulo": {"kind": "modulo", "k": 2 * k},
        }
        hashing = Hashing(**{"k": k, "seed": setup.seed + number, **kinds.get(method, {"kind": method})})
    row = 4 * 2 * DIM
    hbm = (row + 64) * min(synth.keys, 100_000_000) + (64 << 20) if setup.device == "cuda" else None
    return Config(
        data=Data(format="synth", synth=synth, hashing=hashing),
        model=ModelConfig(
            name="lr" if method == "lr" else "dnn", dim=DIM, hidden=HIDDEN, dropout=0.0, embedding_l2=0.0, initial=0.01
        ),
        tiers=Tiers(device=setup.device, hbm=hbm, mem=(row + 100) * synth.keys + (64 << 20)),
        train=Train(
            batch_size=BATCH[setup.device], optimizer="adagrad", lr=0.05, dense_optimizer="adam", dense_lr=1e-3,
            seed=setup.seed,
        ),
    )  # fmt: skip


def steps(setup: Setup) -> list[Step]:
    """Return one training per data set, row and hash function."""
    made = []
    for dataset in EXAMPLES:
        for method, name, log2_k in _rows(setup, dataset):
            k = None if log2_k is None else bins(setup, log2_k)
            for number in range(hashes(setup, dataset, method)):
                row_config = config(setup, dataset, method, k, number)

                def run(context: StepContext, row_config: Config = row_config) -> Json | None:
                    from experiments.training import train

                    return train(row_config, context)

                made.append(
                    Step(
                        name=_step_name(dataset, name, number),
                        settings=config_settings(row_config),
                        expected_seconds=1 + examples(setup, dataset) / (120_000 if setup.device == "cpu" else 1e6),
                        run=run,
                    )
                )
    return made


def _step_name(dataset: str, name: str, number: int = 0) -> str:
    return f"{dataset}, {name}" + (f", hash {number + 1}" if number else "")


# ---- section of the report


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    """Show a table, a curve and the paper's curve per data set."""
    parts: list[Table | Figure] = []
    claims: list[Claim] = []
    for dataset in EXAMPLES:
        published = paper.load()["hashing"][dataset]
        parts += [
            _table(setup, dataset, published, results),
            _curve(setup, dataset, results),
            _paper_curve(dataset, published),
        ]
        claims += _claims(setup, dataset, results)
    least = ", ".join(f"{dataset} {bins_per_nonzero(setup, dataset):.1f}" for dataset in EXAMPLES)
    keys = {dataset: f"{config(setup, dataset, 'lr', None).data.synth.keys:,}" for dataset in EXAMPLES}
    return Section(
        text=[
            f"Generated ads (tc.SyntheticAds): {FIELDS} fields, {NONZEROS} nonzeros per example, Zipf exponent {ZIPF}, "
            f"{keys['image']} and {keys['web']} keys. The number of keys and k are those of the two data "
            f"sets of Zhao (2026) divided by {divisor(setup):,.0f}. One pass over {examples(setup, 'image'):,} and "
            f"{examples(setup, 'web'):,} examples; AUC is measured on other examples. Skew and nonzeros were chosen "
            "so that the order of methods of Zhao (2026) can appear at this size: examples suffice to learn most keys. "
            "With fewer examples, as with --quick, hash+DNN may be below LR. Bins of the smallest k per nonzero of an "
            f"example: {least}. From {LEAST_BINS} on, every row of hash+DNN is claimed to lie between LR and DNN.",
            f"LR has one weight per key; the networks have rows of {DIM} weights and hidden layers of {HIDDEN[0]} and "
            f"{HIDDEN[1]} units. OP+OSRP hashes all nonzeros of an example together, as Zhao (2026), into 2k slots "
            "whose rows are pooled into one vector; the per-field variant keeps one vector per field. Modulo has 2k "
            f"rows, count-sketch has k. AUCs of OP+OSRP are means over {hashes(setup, 'image', 'op_osrp')} (image) and "
            f"{hashes(setup, 'web', 'op_osrp')} (web) hash functions; the other methods use one.",
        ],
        parts=parts,
        claims=claims,
    )


def _table(setup: Setup, dataset: str, published: Mapping[str, Any], results: Mapping[str, Json]) -> Table:
    paper_rows = {row["log2_k"]: row for row in published["hash"]}
    rows = []
    for method, name, log2_k in _rows(setup, dataset):
        result = results[_step_name(dataset, name)]
        paper_row: Mapping[str, Any] = paper_rows[log2_k] if method == "op_osrp" else published.get(method, {})
        label = name if method in ("lr", "dnn") else f"hash+DNN, {name}"
        k = None if log2_k is None else bins(setup, log2_k)
        size = result["rows"] * result["row_bytes"]
        rows.append(
            (
                label, k, result["rows"], size, _auc(dataset, name, results), paper_row.get("weights"),
                paper_row.get("auc"),
            )
        )  # fmt: skip
    return Table(
        name=f"table-{dataset}",
        title=f"{published['title']}, scaled: trained rows, bytes and AUC",
        columns=("model", "scaled k", "trained rows", "bytes of rows", "test AUC", "nonzero weights", "AUC"),
        rows=rows,
        paper=("nonzero weights", "AUC"),
        note=(
            "The model's name has the k of Zhao (2026); the scaled k is the number of bins here. Bytes are those of "
            f"weights and Adagrad's state. {paper.load()['note'] if dataset == 'image' else ''}"
        ).strip(),
    )


def _auc(dataset: str, name: str, results: Mapping[str, Json]) -> float:
    """Return the mean AUC over the hash functions of a row."""
    names = itertools.takewhile(
        results.__contains__, (_step_name(dataset, name, number) for number in itertools.count())
    )
    return statistics.fmean(float(results[step]["auc"]) for step in names)


def _curve(setup: Setup, dataset: str, results: Mapping[str, Json]) -> Figure:
    series = []
    for method, label in METHODS.items():
        points = [(bins(setup, k), name) for m, name, k in _rows(setup, dataset) if m == method and k is not None]
        series.append(
            Series(name=label, x=[k for k, _ in points], y=[_auc(dataset, name, results) for _, name in points])
        )
    return Figure(
        name=f"auc-{dataset}",
        title=f"{paper.load()['hashing'][dataset]['title']}, scaled: AUC against k",
        x_label="scaled k (bins)",
        y_label="test AUC",
        x_scale="log2",
        series=series,
        hlines={"DNN": _auc(dataset, "DNN", results), "LR": _auc(dataset, "LR", results)},
    )


def _paper_curve(dataset: str, published: Mapping[str, Any]) -> Figure:
    rows = published["hash"]
    line = Series(name="OP+OSRP", x=[2 ** row["log2_k"] for row in rows], y=[row["auc"] for row in rows], kind="paper")
    return Figure(
        name=f"paper-{dataset}",
        title=f"{published['title']}: AUC against k, Zhao (2026)",
        x_label="k (bins)",
        y_label="test AUC",
        x_scale="log2",
        series=[line],
        hlines={f"DNN{MARKS['paper']}": published["dnn"]["auc"], f"LR{MARKS['paper']}": published["lr"]["auc"]},
    )


def _claims(setup: Setup, dataset: str, results: Mapping[str, Json]) -> list[Claim]:
    lr, dnn = (_auc(dataset, name, results) for name in ("LR", "DNN"))
    curve = [_auc(dataset, name, results) for method, name, _ in _rows(setup, dataset) if method == "op_osrp"]
    published = paper.load()["hashing"][dataset]
    printed = [row["auc"] for row in published["hash"]]
    baselines = f"LR {published['lr']['auc']:.4f}, DNN {published['dnn']['auc']:.4f}"
    return [
        Claim(
            text=f"{dataset}: the network beats logistic regression",
            holds=dnn > lr,
            detail=f"LR {lr:.4f}, DNN {dnn:.4f}",
            part=f"auc-{dataset}",
            paper=baselines,
        ),
        Claim(
            text=f"{dataset}: hash+DNN at the largest k lies between LR and DNN",
            holds=lr < curve[0] < dnn,
            detail=f"LR {lr:.4f}, hash+DNN {curve[0]:.4f}, DNN {dnn:.4f}",
            part=f"auc-{dataset}",
            ours=f"{curve[0]:.4f}",
            paper=f"{printed[0]:.4f}",
        ),
        *_every_row(setup, dataset, lr, dnn, curve),
        Claim(
            text=f"{dataset}: AUC falls as k halves",
            holds=falls(curve),
            detail=f"{', '.join(f'{auc:.4f}' for auc in curve)}; a rise below {NOISE} between neighbours is chance",
            part=f"auc-{dataset}",
            ours=f"{curve[0]:.4f} to {curve[-1]:.4f}",
            paper=f"{printed[0]:.4f} to {printed[-1]:.4f}",
        ),
    ]


def _every_row(setup: Setup, dataset: str, lr: float, dnn: float, curve: Sequence[float]) -> list[Claim]:
    """Claim the paper's order for every k, where the scale leaves enough bins."""
    if bins_per_nonzero(setup, dataset) < LEAST_BINS:
        return []
    outside = [auc for auc in curve if not lr < auc < dnn]
    return [
        Claim(
            text=f"{dataset}: every row of hash+DNN lies between LR and DNN",
            holds=not outside,
            detail=f"LR {lr:.4f}, DNN {dnn:.4f}; {len(outside)} of {len(curve)} rows outside"
            + "".join(f", {auc:.4f}" for auc in outside),
            part=f"auc-{dataset}",
            ours=f"{len(outside)} of {len(curve)} outside",
            paper="0 outside" if dataset == "image" else "2 below LR",
        )
    ]


def falls(curve: Sequence[float]) -> bool:
    """Whether no neighbour rises by NOISE or more, and every second value and the last are lower."""
    steady = all(b < a + NOISE for a, b in itertools.pairwise(curve))
    return steady and all(b < a for a, b in zip(curve, curve[2:], strict=False)) and curve[-1] < curve[0]


EXPERIMENT = Experiment(title="Hashing into fewer bins: tables 1 and 2 of Zhao (2026)", steps=steps, section=section)
