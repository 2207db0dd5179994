"""Times of dist beside Gloo, from Python, in the same processes and in turns.

    python compare.py [--ranks N] [--bytes-max N] [--rounds N] [--train]

Prints one line per operation and size: the median over the rounds of the slowest rank's time, and how many times as long
Gloo took. `--train` times a step of DDP and of FSDP2 instead. Set `DIST_TRANSPORT=tcp` for dist over TCP; Gloo has
nothing else. Measure on a machine that does nothing else: the first line tells its load.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

SIZES = [8, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 27]


def operations(size, ranks):
    """Returns the operations on buffers of this many bytes per rank, each as a function of the group."""
    numbers = max(1, size // 4)
    whole, part = torch.zeros(numbers), torch.zeros(max(1, numbers // ranks))
    divided, received = torch.zeros(part.numel() * ranks), torch.zeros(part.numel() * ranks)
    return {
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "broadcast": lambda group: dist.broadcast(whole, 0, group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(received, part, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(part, divided, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(received, divided, group=group),
    }


def seconds_of(call, group, calls):
    dist.barrier(group)
    began = time.perf_counter()
    for _ in range(calls):
        call(group)
    return (time.perf_counter() - began) / calls


def slowest(seconds):
    tensor = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def compare(name, size, call, groups, arguments, rank):
    """Times a call in both groups, in turns."""
    once = slowest(max(seconds_of(call, group, 2) for group in groups.values()))
    calls = max(1, min(2000, int(0.1 / once)))
    times = {backend: [] for backend in groups}
    for _ in range(arguments.rounds):
        for backend, group in groups.items():
            times[backend].append(slowest(seconds_of(call, group, calls)))
    if rank == 0:
        ours, gloo = (statistics.median(times[backend]) * 1e6 for backend in ("dist", "gloo"))
        print(f"{name:16}{size:>12} B  dist {ours:12.1f} us  gloo {gloo:12.1f} us  {gloo / ours:6.1f} times as long", flush=True)


def model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)])


def step_of(strategy, group, ranks):
    """Returns a function that makes a training step of a model of a million parameters."""
    module = model()
    if strategy == "ddp":
        module = DistributedDataParallel(module, process_group=group)
    else:
        mesh = dist.DeviceMesh.from_group(group, "cpu")
        for block in module:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    inputs = torch.randn(64, 512)

    def step(_):
        module(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare_training(strategy, groups, arguments, rank):
    steps = {backend: step_of(strategy, group, arguments.ranks) for backend, group in groups.items()}
    times = {backend: [] for backend in groups}
    for _ in range(arguments.rounds):
        for backend, group in groups.items():
            times[backend].append(slowest(seconds_of(steps[backend], group, 10)))
    if rank == 0:
        ours, gloo = (statistics.median(times[backend]) * 1e3 for backend in ("dist", "gloo"))
        print(f"step of {strategy:6}  dist {ours:8.2f} ms  gloo {gloo:8.2f} ms  {gloo / ours:6.2f} times as long", flush=True)


def program(rank, arguments, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(os.path.join(folder, "store"), arguments.ranks)
    dist.init_process_group("dist", store=store, rank=rank, world_size=arguments.ranks)
    groups = {"dist": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    if arguments.train:
        for strategy in ("ddp", "fsdp"):
            compare_training(strategy, groups, arguments, rank)
    else:
        for size in (size for size in SIZES if size <= arguments.bytes_max):
            for name, call in operations(size, arguments.ranks).items():
                compare(name, size, call, groups, arguments, rank)
        compare("barrier", 0, dist.barrier, groups, arguments, rank)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes-max", type=int, default=SIZES[-1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", action="store_true")
    arguments = parser.parse_args()
    print(f"{arguments.ranks} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(program, (arguments, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
