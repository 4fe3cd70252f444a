"""Imports what ranks need, once, in the process that they are forked from (helpers/ranks.py). It touches no GPU.

Every rank imports the module of its test; without this, what that imports takes 0.2 s of processor time per rank.
"""

# ruff: noqa: F401
import gc

import hypothesis.strategies
import pytest
import torch._dynamo  # imported by the first optimizer of a process
import torch.distributed

import helpers.cli
import helpers.dense
import helpers.machines
import helpers.online
import helpers.restarts
import thermocline.distributed.dense_sync
import thermocline.models.layers
import thermocline.training.run
import thermocline.training.trainer

gc.collect()
gc.freeze()  # a collection in a rank would copy the memory of all these objects
