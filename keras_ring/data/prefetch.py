"""Reading ahead, beside training."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any


def read_ahead(
    load: Callable[[int], Any], num_batches: int, *, num_threads: int, depth: int
) -> Iterator[Any]:
    """Yield `load(0)`, `load(1)`, ... in this order, loaded by threads while others are used.

    Args:
        load: Returns a batch; called by several threads at once if there are.
        num_batches: How many.
        num_threads: How many threads load; 0 loads each batch when it is asked for.
        depth: How many batches are loaded ahead of the one that is used, at most.

    What `load` raises is raised where its batch would have come. The threads end with the last
    batch, or when the iterator is closed or forgotten.
    """
    if num_threads == 0:
        yield from map(load, range(num_batches))
        return
    pool = concurrent.futures.ThreadPoolExecutor(num_threads, "keras_ring_data")
    pending: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
    try:
        for index in range(num_batches + depth):
            if index < num_batches:
                pending.append(pool.submit(load, index))
            if index >= depth:
                yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
