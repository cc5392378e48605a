"""The cells of `experiments/full_step_matrix.py`: ways to compile forward, loss, backward, clipping and Adam together.

problem.py      what every cell is given, and the eager oracle that it must equal
registry.py     what a cell is, and the list of all of them
report_*.py     the eleven approaches of the report, as written and repaired
routes*.py      the ways that give one graph
hopes.py        the APIs that the report hoped for
baselines.py    what the others are compared with
polyfills.py    trees for a Dynamo that cannot trace optree's
measure.py      one cell, run in a process of its own
pool.py         the processes
record.py       the JSON files: resuming, and what changed
tables.py       the Markdown made from them
"""
