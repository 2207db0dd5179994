"""Runs a function as all ranks of a job, each in a process of its own."""

import os
import signal
import tempfile
import traceback
from datetime import timedelta

import dist_torch  # noqa: F401, so that each rank has it
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

torch.set_num_threads(1)
os.environ.setdefault("DIST_COSTS", "off")


def run(world_size, program, *arguments, backend="dist", timeout=timedelta(seconds=30), may_die=()):
    """Returns what `program(rank, *arguments)` returns on each rank, in rank order.

    A rank of `may_die` that ends without a result has the result None. An error of any other rank is raised.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            arguments_of_rank = (rank, world_size, program, arguments, backend, timeout, os.path.join(folder, "store"), theirs)
            process = context.Process(target=_rank, args=arguments_of_rank)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results = [_result(rank, pipe, rank in may_die) for rank, pipe in enumerate(pipes)]
        for process in processes:
            process.join()
    failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(results) if error is not None]
    if failed:
        raise AssertionError("\n".join(failed))
    return [result for result, _ in results]


def _result(rank, pipe, may_die):
    try:
        return pipe.recv()
    except EOFError:
        return None, None if may_die else "it ended without a result"


def _rank(rank, world_size, program, arguments, backend, timeout, store, pipe):
    # A job in the background of a shell ignores SIGINT, and so would its ranks.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        store = dist.FileStore(store, world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        result = program(rank, *arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send((result, None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def error_of(call):
    """Returns the type and the text of the exception that a call raises."""
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error)
    return None, "the call returned"
