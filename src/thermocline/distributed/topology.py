"""`Topology`: nodes, GPU links and NUMA binding of a job's ranks, from torchrun, a file or the driver.

Immutable; any thread may use it. Loads no torch. Raises `ConfigError` for an invalid file or environment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from thermocline.distributed.key_sharding import MAX_RANKS
from thermocline.errors import ConfigError

LinkedPairs = frozenset[tuple[int, int]]
"""Pairs of ranks (a, b), a < b."""


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of a job, by node."""

    world: int
    """Number of ranks."""
    rank: int
    """Rank of this process."""
    nodes: tuple[tuple[int, ...], ...]
    """Ranks of each node. Concatenated they are 0 to world - 1."""
    links: LinkedPairs | None = None
    """Pairs of ranks of one node whose GPUs have a fast link; None: every pair has one."""
    numa: tuple[int | None, ...] | None = None
    """NUMA node that each rank is bound to; None: not bound."""

    def __post_init__(self) -> None:
        if not 1 <= self.world <= MAX_RANKS:
            raise ConfigError(f"world is {self.world}: it must be 1 to {MAX_RANKS}")
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank is {self.rank}: it must be 0 to {self.world - 1}")
        if [rank for node in self.nodes for rank in node] != list(range(self.world)) or not all(self.nodes):
            raise ConfigError(
                f"nodes are {[list(node) for node in self.nodes]}: they must list ranks 0 to {self.world - 1}, each "
                "once, in order, and no node may be empty"
            )
        for a, b in self.links or ():
            if not (0 <= a < b < self.world and self._node_of(a) == self._node_of(b)):
                raise ConfigError(f"link ({a}, {b}) is invalid: it must join two different ranks of one node")
        if self.numa is not None and len(self.numa) != self.world:
            raise ConfigError(f"numa has {len(self.numa)} entries: it must have one for each of {self.world} ranks")

    # ---- nodes

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return self._node_of(self.rank)

    @property
    def local_rank(self) -> int:
        """Index of this rank within its node."""
        return self.nodes[self.node].index(self.rank)

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes have the same number of ranks. Two-hop exchange requires it."""
        return len({len(node) for node in self.nodes}) == 1

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks with this rank's local rank, one per node, in node order; smaller nodes may have none."""
        local_rank = self.local_rank
        return tuple(node[local_rank] for node in self.nodes if local_rank < len(node))

    @property
    def node_of(self) -> tuple[int, ...]:
        """Index of each rank's node."""
        return tuple(index for index, node in enumerate(self.nodes) for _ in node)

    def _node_of(self, rank: int) -> int:
        return next(index for index, node in enumerate(self.nodes) if rank in node)

    # ---- links

    def is_linked(self, a: int, b: int) -> bool:
        """Return whether a and b are the same rank or have a fast link."""
        return a == b or self.links is None or (min(a, b), max(a, b)) in self.links

    def next_hop(self, a: int, b: int) -> int:
        """Return the rank that a sends messages for b of the same node to: b, or a rank linked with both.

        Pairs are spread over several possible relays. Returns b if no rank is linked with both.
        """
        if self.is_linked(a, b):
            return b
        node = self.nodes[self._node_of(a)]
        relays = [c for c in node if c not in (a, b) and self.is_linked(a, c) and self.is_linked(c, b)]
        return relays[(node.index(a) + node.index(b)) % len(relays)] if relays else b

    @property
    def relaying_nodes(self) -> set[int]:
        """Nodes in which some pair of ranks sends through a third rank."""
        return {
            index
            for index, node in enumerate(self.nodes)
            if self.links is not None and any(self.next_hop(a, b) != b for a in node for b in node)
        }

    # ---- constructors

    @classmethod
    def single(cls) -> Self:
        """Return a job of one rank."""
        return cls(1, 0, ((0,),))

    def to_json(self) -> dict[str, Any]:
        """Return everything but the rank, as JSON values."""
        links = None if self.links is None else sorted(self.links)
        return {"nodes": self.nodes, "links": links, "numa": self.numa}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], rank: int) -> Self:
        """Restore the result of `to_json`. Raises TypeError or ValueError for values of other types."""
        nodes = tuple(tuple(int(r) for r in node) for node in values["nodes"])
        pairs, numbers = values.get("links"), values.get("numa")
        links = None if pairs is None else frozenset((min(a, b), max(a, b)) for a, b in pairs)
        numa = None if numbers is None else tuple(None if n is None else int(n) for n in numbers)
        return cls(sum(map(len, nodes)), rank, nodes, links, numa)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], rank: int) -> Self:
        """Read TOML or JSON: `nodes = [[0, 1], [2, 3]]`, optional `links = [[0, 1]]` and `numa = [0, 0, 1, 1]`."""
        name = os.fspath(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
            content = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name}: cannot read the topology (TOML, or JSON if named *.json): {error}") from None
        if not isinstance(content, dict) or not content.keys() <= {"nodes", "links", "numa"} or "nodes" not in content:
            raise ConfigError(f"{name}: requires nodes = [[0, 1], [2, 3]]; the only optional keys are links and numa")
        try:
            return cls.from_json(content, rank)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}: nodes, links and numa must be lists of numbers: {error}") from None


# ---- links, from the driver


def nvlink_pairs(ranks: tuple[int, ...]) -> LinkedPairs | None:
    """Return the pairs of ranks whose GPUs have NVLink, rank i of `ranks` on GPU i; None if unknown or without NVLink.

    Runs nvidia-smi, for at most 20 s.
    """
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_nvlink_matrix(done.stdout, ranks)


def parse_nvlink_matrix(matrix: str, ranks: tuple[int, ...]) -> LinkedPairs | None:
    """Parse `nvidia-smi topo -m`: NV1, NV2, ... are links; X, PIX, PXB, PHB, NODE and SYS are not."""
    pairs: set[tuple[int, int]] = set()
    columns: list[int] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", matrix).splitlines():
        cells = [cell.strip() for cell in line.split("\t")]
        if not columns:
            columns = [int(cell[3:]) for cell in cells if re.fullmatch(r"GPU\d+", cell)]
        elif re.fullmatch(r"GPU\d+", cells[0]):
            row = int(cells[0][3:])
            for column, cell in zip(columns, cells[1:], strict=False):
                if cell.startswith("NV") and row < len(ranks) and column < len(ranks):
                    pairs.add((min(ranks[row], ranks[column]), max(ranks[row], ranks[column])))
    return frozenset(pairs) or None
