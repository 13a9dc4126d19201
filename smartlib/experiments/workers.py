"""Where tasks run: on all cores of this machine, or on the Dask cluster whose scheduler ``SMARTLIB_SCHEDULER`` names.

A cluster (extra ``cluster``) is any that Dask knows: ``dask scheduler`` here and ``dask worker tcp://...`` there, a
batch system by dask-jobqueue, Kubernetes. Its workers need this version of the library and, for public data, the folder
SMARTLIB_DATA_DIR. A worker that dies loses nothing but time: its tasks are given to another.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from joblib import Parallel, delayed, effective_n_jobs

import smartlib

if TYPE_CHECKING:
    from smartlib.experiments.records import Task


def compute(tasks: Sequence[Task]) -> Iterator[tuple[Task, dict]]:
    """Run the tasks and give each with its result as soon as that is there, in no particular order.

    Args:
        tasks: what to run.

    Raises:
        RuntimeError: workers of the cluster have other sources of the library than this process.
        Exception: whatever a task raises; the others are given up.

    Source: ours.
    """
    address = os.environ.get("SMARTLIB_SCHEDULER")
    if address and tasks:
        yield from _on_cluster(tasks, address)
    elif effective_n_jobs(-1) == 1 or not tasks:
        for task in tasks:
            yield task, task.run()
    else:
        # A single task goes to a worker too: there it has one thread, and numerical libraries do not fight for cores.
        # One task at a time for a worker: of several that are sent together none would be kept before the last.
        parallel = Parallel(n_jobs=-1, return_as="generator_unordered", batch_size=1, pre_dispatch="2 * n_jobs")
        for index, result in parallel(delayed(_run)(i, task.run) for i, task in enumerate(tasks)):
            yield tasks[index], result


def library_hash() -> str:
    """A hash of the library's sources, as this process would import them."""
    package = Path(smartlib.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _run(index: int, run: Callable[[], dict]) -> tuple[int, dict]:
    return index, run()


def _on_cluster(tasks: Sequence[Task], address: str) -> Iterator[tuple[Task, dict]]:
    try:
        from distributed import Client, as_completed
    except ImportError as error:
        raise ImportError(
            "SMARTLIB_SCHEDULER is set: install the extra `cluster` (pip install -e .[cluster])"
        ) from error
    with Client(address) as client:
        ours = library_hash()
        other = [worker for worker, theirs in client.run(library_hash).items() if theirs != ours]
        if other:
            raise RuntimeError(f"these workers run other sources of smartlib than this process: {', '.join(other)}")
        futures = {client.submit(task.run, pure=False): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
