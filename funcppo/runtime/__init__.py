"""Fast execution of pure functions: compilation, CUDA graphs, host transfers, and measurements of both.

The runtime receives the functions of a training step as arguments. From this package it imports the vocabulary only
(`types`, `tree`, `random`), and everything else runs without it too: eagerly, with equal results.

    compile.py           compilation strategies: `select_strategy` picks one, `compile_function` compiles one function
    cache.py             compiled functions on disk, found again by later processes
    cache_key.py         what such code depends on
    equivalence.py       the check that a compiled function computes what the eager one does
    capture.py           a step over static buffers, or a function that is called again and again, as a CUDA graph
    host_transfer.py     copies between host and GPU that overlap with computation
    monitor.py           counts of compilations and recordings, times, and one warning when they repeat
    memory.py            memory in use on a device
    collectives.py       gathers among processes, in compiled functions and CUDA graphs, and what all agree on
    distributed.py       the processes that torchrun started: agreement, tasks, results in order
    inductor/            rewrites and kernels that Inductor uses

Tensors are overwritten in this folder only, and in five places of it. `capture.py` copies the new state of a step over
its buffers, and writes the outputs of a loop body into their rows of the stacked result. `host_transfer.py`
fills staging buffers and pinned memory. `compile.fused_adam` updates copies of its arguments, and `collectives.py`
receives into copies. All other functions return new tensors, and no function writes to a tensor that a caller passes
in.
"""
