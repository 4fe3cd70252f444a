"""In-memory parameter server on MPI: rows are sharded over the DRAM of the ranks.

Every rank is worker and server. A key is owned by the rank of its hash; a row exists at its owner only. One step:

1. read this rank's part of the mini-batch and deduplicate its ids         stages read, collect
2. send the unique keys to their owners, which pin their rows              plan: Alltoall of counts, Alltoallv of keys
3. receive the weights of these keys                                       pull: Alltoallv of rows
4. forward and backward                                                    compute
5. send one gradient per unique key to its owner, which adds them in       push: Alltoallv, then one update per key
   rank order and applies the optimizer once
6. sum the dense gradients of all ranks, dense optimizer step              dense: Iallreduce, started before the push

Steps 1 and 2 of later mini-batches run ahead on pipeline threads (`train.depth`), with a separate communicator. Rows
and gradients move within their step, so no row is stale. There is no tier below DRAM and there are no checkpoints.
"""
