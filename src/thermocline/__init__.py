"""Embedding tables larger than memory: rows live in HBM, DRAM and SSD, exact and crash-safe."""

__version__ = "0.1.0"
