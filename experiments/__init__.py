"""`thermocline reproduce`: the source's tables and figures, measured on this machine and written down as one page.

experiment.py   the words: steps, tables, figures, claims        places.py    which experiments there are
runner.py       steps one after the other, none done twice        results.py   what each step gave, kept
page.py         the report; svg.py draws, tables.py writes CSV    machine.py   where it ran
mpi.py, ranks.py   trainings of several processes
paper.json      the source's own figures, only ever shown beside ours and marked as theirs
All other modules are experiments, one per file.
"""
