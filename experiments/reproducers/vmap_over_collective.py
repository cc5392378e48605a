"""A functional collective under torch.vmap returns the wrong numbers, and says nothing."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.multiprocessing as processes


def work(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    total = lambda x: collectives.all_reduce(x, "sum", dist.group.WORLD)
    x = torch.tensor([1.0, 10.0]) * (rank + 1)
    one_by_one = torch.stack([total(row) for row in x]).tolist()
    try:
        mapped = torch.vmap(total)(x).tolist()
    except Exception as error:
        mapped = f"{type(error).__name__}: {error}".splitlines()[0]
    dist.barrier()
    if rank == 0:
        print(f"all-reduce row by row {one_by_one}, under vmap {mapped}")
    dist.destroy_process_group()


if __name__ == "__main__":
    processes.start_processes(
        work, (sys.argv[1],), nprocs=2, start_method="fork"
    )
