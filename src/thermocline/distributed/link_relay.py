"""All-to-all within a node that avoids slow GPU pairs: their messages pass through a third rank linked with both.

Round 1: every rank sends to rank c all messages whose next hop is c. Round 2: rank c forwards those for other ranks.

Called by `Communicator.all_to_all` on the communicator's thread. It blocks in `exchange` and raises its errors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from thermocline.distributed.topology import Topology

AllToAll = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]
"""Direct all-to-all of the node: (values, items to each rank, items from each rank) -> received values, by sender."""


def relayed_all_to_all(
    topology: Topology, values: torch.Tensor, sizes: list[list[int]], exchange: AllToAll
) -> tuple[torch.Tensor, int]:
    """Return the received values, by sender, and the number of items that this rank forwarded for other pairs.

    values   grouped by destination, in the node's order
    sizes    [sender][destination] items, for all pairs of the node
    """
    node, me = topology.nodes[topology.node], topology.local_rank
    count = range(len(node))
    hop = [[node.index(topology.next_hop(a, b)) for b in node] for a in node]
    # Round 1: to rank c all messages that pass through it, by destination.
    messages = _split(values, sizes[me])
    outgoing = [messages[b] for c in count for b in count if hop[me][b] == c]
    sends = [sum(sizes[me][b] for b in count if hop[me][b] == c) for c in count]
    receives = [sum(sizes[a][b] for b in count if hop[a][b] == me) for a in count]
    received = exchange(torch.cat(outgoing), sends, receives)
    held: dict[tuple[int, int], torch.Tensor] = {}
    for a, message in zip(count, _split(received, receives), strict=True):
        through = [b for b in count if hop[a][b] == me]
        parts = _split(message, [sizes[a][b] for b in through])
        held |= {(a, b): part for b, part in zip(through, parts, strict=True)}
    # Round 2: forward the messages of other pairs, by destination, then by sender.
    forward = [[(a, b) for a in count if hop[a][b] == me != b] for b in count]
    outgoing = [held[pair] for pairs in forward for pair in pairs]
    sends = [sum(sizes[a][b] for a, b in pairs) for pairs in forward]
    senders = [[a for a in count if hop[a][me] == c != me] for c in count]
    receives = [sum(sizes[a][me] for a in relayed) for relayed in senders]
    received = exchange(torch.cat(outgoing) if outgoing else values[:0], sends, receives)
    by_sender = {a: held[a, me] for a in count if hop[a][me] == me}
    for relayed, message in zip(senders, _split(received, receives), strict=True):
        parts = _split(message, [sizes[a][me] for a in relayed])
        by_sender |= dict(zip(relayed, parts, strict=True))
    return torch.cat([by_sender[a] for a in count]), sum(sends)


def _split(values: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.split(values, sizes))
