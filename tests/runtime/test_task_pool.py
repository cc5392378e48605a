"""Tasks of rank 0 that all processes do; here threads that share a store."""

from __future__ import annotations

import threading
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed import HashStore

from funcppo.runtime.distributed import Processes
from funcppo.runtime.task_pool import TaskPool, decode, encode

done: list[int] = []


class Pair(NamedTuple):
    """A record of tensors."""

    value: torch.Tensor
    name: str


def multiply(factor, context, latest, task):
    """Yield twice what a task is, as tensors."""
    done.append(task)
    yield Pair(context * factor * task, "first")
    yield Pair(latest() + task, "second")


def pools(n):
    store = HashStore()
    return [
        TaskPool(Processes(store=store, rank=rank, world_size=n), "cpu")
        for rank in range(n)
    ]


def with_helpers(n, main):
    """What rank 0 returns, whose pool the others serve."""
    done.clear()
    first, *others = pools(n)
    threads = [
        threading.Thread(target=pool.serve, args=(torch.tensor([10]),))
        for pool in others
    ]
    for thread in threads:
        thread.start()
    with first:
        result = main(first)
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return result


def test_results_come_in_the_order_of_the_tasks_and_each_is_done_once():
    def main(pool):
        return [
            [
                (pair.name, pair.value.tolist())
                for pair in pool.map_tasks(
                    torch.tensor([10]),
                    partial(multiply, factor),
                    range(n_tasks),
                    lambda: torch.tensor([0.5]),
                )
            ]
            for factor, n_tasks in ((torch.tensor(2), 9), (torch.tensor(3), 4))
        ]

    expected = [
        [
            pair
            for task in range(n_tasks)
            for pair in (
                ("first", [10 * factor * task]),
                ("second", [task + 0.5]),
            )
        ]
        for factor, n_tasks in ((2, 9), (3, 4))
    ]
    for n in (1, 2, 3):
        assert with_helpers(n, main) == expected
        assert sorted(done) == sorted([*range(9), *range(4)])


def test_no_task_is_begun_after_the_results_are_closed():
    def main(pool):
        results = pool.map_tasks(
            torch.tensor([10]),
            partial(multiply, torch.tensor(1)),
            range(10**6),
            lambda: torch.tensor([0.5]),
        )
        next(results)
        results.close()

    with_helpers(2, main)
    assert len(done) < 10**6


def test_a_tensor_is_sent_without_what_its_storage_holds_beside_it():
    part = torch.arange(10**6)[5:8]
    block = encode(Pair(part, "part"))
    assert len(block) < 1000
    got = decode(block, "cpu")
    assert got.name == "part" and torch.equal(got.value, part)
    got.value.add_(1)  # it can be written


def test_tensors_arrive_on_the_device_that_is_asked_for():
    sent = {"rows": torch.arange(3), "nested": [(torch.ones(2), "text")]}
    got = decode(encode(sent), "meta")
    ((tensor, text),) = got["nested"]
    assert [x.device.type for x in (got["rows"], tensor)] == ["meta"] * 2
    assert text == "text"
