"""Cost model of `thermocline plan`: predicts the time of a training step from measured or given hardware figures.

hardware          figures of one node: costs, rates, sizes; a TOML file
calibrate         measures these figures on this machine (calibrate_ranks: with two ranks)
workload          the figures of a model and its data, from a config (op_counter, dense_timing: its dense network)
cache_model       unique keys per batch and cache hit rates, from the distribution of keys
ssd_model         reads of the SSD store, and the look-ahead
cost_model        predicts one step: workload x cluster x hardware -> seconds per stage and resource
"""
