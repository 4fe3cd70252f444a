"""The experiments of Zhao et al., run on this machine and reported as one HTML page: `python -m experiments`.

README.md lists the experiments, the commands and the files they write. Read the modules in this order:

experiment.py   Setup, Step, Table, Figure, Claim, Experiment    registry.py     the list of experiments
runner.py       runs the steps that have no cached result        step_cache.py   one JSON file per finished step
results.py      one JSON file per finished experiment            report.py       the page, CSV and JSON files
figures.py      plots, drawn with matplotlib                     machine.py      processor, memory, GPU, versions
training.py     training loops that the experiments share        launch.py       torchrun and mpirun jobs
disk_probe.py   read rate of the disk                            paper.json      the numbers printed by Zhao (2026)
popularity.py   rows placed in the tiers by their frequency      steady_meter.py ramp-up and steady state of a training

Every other module is one experiment.
"""
