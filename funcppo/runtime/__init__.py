"""Fast execution of pure functions: compilation, CUDA graphs, host transfers, and measurements of both.

The runtime receives the functions of a training step as arguments. From this package it imports the vocabulary only
(`core`), and everything else runs without it too: eagerly, with equal results.

    compile.py           `select_strategy` compiles a training step, `compile_function` one function; both compare
    cache.py             compiled functions on disk, found again by later processes
    capture.py           a step over static buffers, or a function that is called again and again, as a CUDA graph;
                         codes of why something is not as fast as it may be
    monitor.py           counts of compilations and recordings, times, and one warning when they repeat
    memory.py            memory in use on a device; copies between host and GPU that overlap with computation
    distributed.py       the processes that torchrun started: agreement, tasks, results in order, collectives
    triton_kernels.py    kernels written by hand: of path networks, and of `nets.fused_mlp`
    inductor.py          graph rewrites and lowerings that Inductor uses
    env_kernel/          the rollout of an environment and a network as one Triton kernel

Tensors are overwritten in this folder only, and in four places of it. `capture.py` copies the new state of a step over
its buffers. `memory.py` fills pinned memory. `compile.fused_adam` updates copies of its arguments,
and `distributed.py` receives into copies. All other functions return new tensors, and no function writes to a tensor
that a caller passes in.
"""
