"""Stages in flight: batches are read, pulled and loaded ahead of the training that needs them."""
