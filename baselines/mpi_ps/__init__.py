"""The classic answer to tables larger than one machine's memory: a parameter server in the RAM of MPI's ranks.

Every rank is worker and server. Keys are owned by hash; no row is ever anywhere else. Per step a rank

1. reads its share of the mini-batch and dedups it,                       read, collect
2. asks the owners for the unique keys; owners dedup and pin them,        plan: Alltoall of counts, Alltoallv of keys
3. gets their weights,                                                    pull: Alltoallv of rows
4. runs the model forward and backward,                                   compute
5. sends one gradient per unique key to its owner, which adds them        push: Alltoallv, then one update per key
   in rank order and applies the optimizer once,
6. adds up the dense gradients of all ranks and steps.                    dense: Iallreduce, begun before the push

Reading, dedup and key exchange of the next steps run ahead on threads of their own (`train.depth`), the last on a
communicator of its own. Rows and gradients move within their step: nothing is ever stale. It has no tier below memory
and no checkpoints.
"""
