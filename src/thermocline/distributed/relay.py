"""Within a node, around slow pairs: what has no fast link to its destination goes through a third rank that has both.

Round 1: everybody sends each rank what is meant for it, or is to go on from there. Round 2: what was to go on goes on.
Which pairs are linked comes from a topology file or from the driver (`driver_links`).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import torch

from thermocline.distributed.topology import Links, Topology

Exchange = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]


def relayed(
    topology: Topology, values: torch.Tensor, sizes: list[list[int]], exchange: Exchange
) -> tuple[torch.Tensor, int]:
    """An all-to-all within the node in two rounds; and how many items this rank carried for others.

    values     grouped by destination, in the node's order
    sizes      [from][to], of all pairs of the node
    exchange   an all-to-all of the node: (values, items to each, items from each) -> what came, by sender
    """
    node, me = topology.nodes[topology.node], topology.local
    count = range(len(node))
    via = [[node.index(topology.relay(a, b)) for b in node] for a in node]
    mine = _cut(values, sizes[me])
    # Round 1: to c all that goes through c, by destination.
    out = [mine[b] for c in count for b in count if via[me][b] == c]
    sends = [sum(sizes[me][b] for b in count if via[me][b] == c) for c in count]
    receives = [sum(sizes[a][b] for b in count if via[a][b] == me) for a in count]
    came = exchange(torch.cat(out), sends, receives)
    held: dict[tuple[int, int], torch.Tensor] = {}
    for a, message in zip(count, _cut(came, receives), strict=True):
        through = [b for b in count if via[a][b] == me]
        held |= {(a, b): part for b, part in zip(through, _cut(message, [sizes[a][b] for b in through]), strict=True)}
    # Round 2: what others gave us to pass on, by destination, then by origin.
    onward = [[(a, b) for a in count if via[a][b] == me != b] for b in count]
    parts = [held[pair] for pairs in onward for pair in pairs]
    sends = [sum(sizes[a][b] for a, b in pairs) for pairs in onward]
    origins = [[a for a in count if via[a][me] == c != me] for c in count]
    receives = [sum(sizes[a][me] for a in through) for through in origins]
    came = exchange(torch.cat(parts) if parts else values[:0], sends, receives)
    last = {(a, me): held[a, me] for a in count if via[a][me] == me}
    for through, message in zip(origins, _cut(came, receives), strict=True):
        last |= {(a, me): part for a, part in zip(through, _cut(message, [sizes[a][me] for a in through]), strict=True)}
    return torch.cat([last[a, me] for a in count]), sum(sends)


def _cut(values: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.split(values, sizes))


# ---- what the driver knows


def driver_links(ranks: tuple[int, ...]) -> Links | None:
    """Pairs of ranks whose GPUs have NVLink, rank by rank on GPU 0, 1, ...; none: no telling, or no NVLink at all."""
    try:
        found = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_links(found.stdout, ranks)


def parse_links(matrix: str, ranks: tuple[int, ...]) -> Links | None:
    """Of `nvidia-smi topo -m`: NV1, NV2, ... are links; X, PIX, PXB, PHB, NODE and SYS are not."""
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
