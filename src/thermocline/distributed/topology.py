"""Which rank runs where: nodes, links between the GPUs of a node, NUMA nodes; from torchrun, a file or the driver."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from thermocline.distributed.key_sharding import MOST_RANKS
from thermocline.errors import ConfigError

Links = frozenset[tuple[int, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of a job, node by node, as one of them sees them."""

    world: int
    """How many ranks there are."""
    rank: int
    """This one."""
    nodes: tuple[tuple[int, ...], ...]
    """The ranks of each node. All of them together are 0 to world - 1, in order."""
    links: Links | None = None
    """Pairs of ranks (a < b) of one node with a fast link between their GPUs; none: every pair has one."""
    numa: tuple[int | None, ...] | None = None
    """Per rank: the NUMA node of its machine that it is bound to; none: not bound."""

    def __post_init__(self) -> None:
        if not 1 <= self.world <= MOST_RANKS:
            raise ConfigError(f"world is {self.world}: there are 1 to {MOST_RANKS} ranks")
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank is {self.rank}: ranks are 0 to {self.world - 1}")
        if [rank for node in self.nodes for rank in node] != list(range(self.world)) or not all(self.nodes):
            raise ConfigError(
                f"nodes are {[list(node) for node in self.nodes]}: they must have ranks 0 to {self.world - 1}, each "
                "once, in order, and every node at least one"
            )
        for a, b in self.links or ():
            if not (0 <= a < b < self.world and self._node_of(a) == self._node_of(b)):
                raise ConfigError(f"link ({a}, {b}): needed are two different ranks of one node, the smaller first")
        if self.numa is not None and len(self.numa) != self.world:
            raise ConfigError(f"numa names {len(self.numa)} ranks, but there are {self.world}")

    # ---- where things are

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self._node_of(self.rank)

    @property
    def local(self) -> int:
        """The number of this rank within its node."""
        return self.nodes[self.node].index(self.rank)

    @property
    def even(self) -> bool:
        """Whether all nodes have as many ranks: what two hops need."""
        return len({len(node) for node in self.nodes}) == 1

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks of this rank's number, one per node, in the order of nodes; nodes that have fewer are left out."""
        local = self.local
        return tuple(node[local] for node in self.nodes if local < len(node))

    @property
    def node_of(self) -> tuple[int, ...]:
        """Per rank: the number of its node."""
        return tuple(number for number, node in enumerate(self.nodes) for _ in node)

    def _node_of(self, rank: int) -> int:
        return next(number for number, node in enumerate(self.nodes) if rank in node)

    # ---- links

    def linked(self, a: int, b: int) -> bool:
        """Whether what a sends b need not cross a slower way: the same rank, or a fast link between the two."""
        return a == b or self.links is None or (min(a, b), max(a, b)) in self.links

    def relay(self, a: int, b: int) -> int:
        """Whom a sends what is meant for b, of its own node: b itself, or a third rank that is linked with both.

        Among several thirds the pairs take turns, so that none carries everything. Where none is linked with both: b.
        """
        if self.linked(a, b):
            return b
        node = self.nodes[self._node_of(a)]
        thirds = [c for c in node if c not in (a, b) and self.linked(a, c) and self.linked(c, b)]
        return thirds[(node.index(a) + node.index(b)) % len(thirds)] if thirds else b

    @property
    def relays(self) -> bool:
        """Whether any pair of this rank's node goes through a third."""
        node = self.nodes[self.node]
        return any(self.relay(a, b) != b for a in node for b in node)

    # ---- made from

    @classmethod
    def alone(cls) -> Self:
        """A world of one."""
        return cls(1, 0, ((0,),))

    @classmethod
    def even_nodes(cls, world: int, rank: int, per_node: int) -> Self:
        """Nodes of `per_node` ranks each."""
        if per_node < 1 or world % per_node:
            raise ConfigError(f"{world} ranks cannot be nodes of {per_node}: give a topology file")
        return cls(world, rank, tuple(tuple(range(i, i + per_node)) for i in range(0, world, per_node)))

    @classmethod
    def of_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """As torchrun says: RANK, WORLD_SIZE, LOCAL_WORLD_SIZE. Without them, a world of one."""
        env = os.environ if env is None else env
        if "WORLD_SIZE" not in env:
            return cls.alone()
        world, rank = _number(env, "WORLD_SIZE"), _number(env, "RANK")
        local = _number(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else world
        return cls.even_nodes(world, rank, local)

    @classmethod
    def of_file(cls, path: str | os.PathLike[str], rank: int | None = None) -> Self:
        """From TOML or JSON: `nodes = [[0, 1], [2, 3]]`, and if wanted `links = [[0, 1]]` and `numa = [0, 0, 1, 1]`.

        rank   none: RANK of the environment. WORLD_SIZE, where it is set, must agree with the file.
        """
        name = os.fspath(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
            found = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name} cannot be read as a topology (TOML, or JSON by its name): {error}") from None
        if not isinstance(found, dict) or not found.keys() <= {"nodes", "links", "numa"} or "nodes" not in found:
            raise ConfigError(f"{name}: needed is nodes = [[0, 1], [2, 3]]; allowed beside it are links and numa")
        try:
            nodes = tuple(tuple(int(r) for r in node) for node in found["nodes"])
            pairs = found.get("links")
            links = None if pairs is None else frozenset((min(a, b), max(a, b)) for a, b in pairs)
            numa = None if found.get("numa") is None else tuple(None if n is None else int(n) for n in found["numa"])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}: nodes, links and numa are lists of numbers: {error}") from None
        world = sum(len(node) for node in nodes)
        said = os.environ.get("WORLD_SIZE")
        if said is not None and said != str(world):
            raise ConfigError(f"{name} has {world} ranks, but WORLD_SIZE is {said}: start as many as the file names")
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        try:
            return cls(world, rank, nodes, links, numa)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None


def _number(env: Mapping[str, str], name: str) -> int:
    text: Any = env.get(name)
    try:
        return int(text)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is {text!r} in the environment: torchrun sets it to a number") from None
