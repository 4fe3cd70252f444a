"""Training over several ranks: topology, process groups, row exchange and dense parameter synchronization."""
