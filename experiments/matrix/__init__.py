"""The cells of `experiments/full_step_matrix.py`: ways to compile forward, loss, backward, clipping and Adam together.

problem.py        what every cell is given, and the eager oracle that it must equal
registry.py       what a cell is, and the list of all of them
steps.py          what several cells are made of
approaches.py     the eleven approaches of the report, as written and repaired, and what they are compared with
routes.py         the ways that give one graph, and the APIs that the report hoped for
ingredients.py    what else a step may hold
fused_kernel.py   the step written by hand as one kernel
polyfills.py      trees for a Dynamo that cannot trace optree's
measure.py        one cell, run in a process of its own
pool.py           the processes
record.py         the JSON files: resuming, and what changed
tables.py         the Markdown made from them
"""
