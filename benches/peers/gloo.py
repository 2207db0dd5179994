"""Times torch.distributed's collectives over Gloo the way `distctl bench` times ours, and prints the same lines.

usage: gloo.py RANKS OPERATIONS BYTES, as in: gloo.py 2 all_reduce,broadcast 8,1024

A sample is a barrier, then calls back to back for about 4 ms; its time is that of one call on the slowest rank.
"""

import json
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

SAMPLES_MAX, SAMPLES_MIN, WARMUPS = 21, 7, 3


def calls_of(operation, count, rank, ranks):
    """One call of the operation; None if Gloo does not have it."""
    data, part = torch.zeros(count), count // ranks
    wide = torch.zeros(count * ranks) if "gather" in operation else None
    narrow, same = torch.zeros(part), torch.zeros(count)
    peer, made = 1 - rank, [0]

    def root():
        made[0] += 1
        return (made[0] - 1) % ranks

    def pingpong():
        if rank > 1:
            return
        for turn in range(2):
            dist.send(data, peer) if turn == rank else dist.recv(data, peer)

    def sendrecv():
        if rank < 2:
            sent = dist.isend(data, peer)
            dist.recv(same, peer)
            sent.wait()

    def gather():
        to = root()
        dist.gather(data, list(wide.chunk(ranks)) if rank == to else None, to)

    def scatter():
        of = root()
        dist.scatter(narrow, list(data.chunk(ranks)) if rank == of else None, of)

    return {
        "all_reduce": lambda: dist.all_reduce(data),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(narrow, data),
        "all_gather": lambda: dist.all_gather_into_tensor(wide, data),
        "all_to_all": lambda: dist.all_to_all_single(same, data),
        "broadcast": lambda: dist.broadcast(data, root()),
        "reduce": lambda: dist.reduce(data, root()),
        "gather": gather,
        "scatter": scatter,
        "barrier": dist.barrier,
        "pingpong": pingpong,
        "sendrecv": sendrecv,
    }.get(operation)


def spent(call, repeats):
    """Microseconds that so many calls take on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    times = torch.tensor([(time.perf_counter() - start) * 1e6])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return max(times.item(), 0.01)


def measure(operation, size, rank, ranks):
    call = calls_of(operation, size // 4, rank, ranks)
    if call is None:
        return
    for _ in range(WARMUPS):
        one = spent(call, 1)
    repeats = int(min(max(4000 / one, 1), 20000))
    samples = int(min(max(3e6 / (one * repeats), SAMPLES_MIN), SAMPLES_MAX))
    trips = 2 if operation == "pingpong" else 1
    times = [spent(call, repeats) / repeats / trips for _ in range(samples)]
    if rank == 0:
        line = {"peer": "gloo", "transport": "tcp", "op": operation, "ranks": ranks, "bytes": size}
        line |= {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
        print(json.dumps(line | {"samples": samples, "touch": False}), flush=True)


def work(rank, ranks, port, operations, sizes):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for operation in operations:
        for size in [0] if operation == "barrier" else sizes:
            measure(operation, size, rank, ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, operations, sizes = int(sys.argv[1]), sys.argv[2].split(","), [int(b) for b in sys.argv[3].split(",")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        work, (ranks, port, operations, sizes), nprocs=ranks, start_method="fork"
    )
