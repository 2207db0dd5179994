"""Times of dist beside Gloo, from Python, as tables for the README.

    python compare.py [--ranks N] [--sizes BYTES,...] [--rounds N]
    python compare.py --train MODEL [--ranks N] [--rounds N]

The first form times operations with both backends in the same processes, in turns. A cell is the median over the rounds of
the slowest rank's time, and in brackets how many times as long Gloo took. The second form times a training step by DDP and
by FSDP2, and shows the highest resident memory of a rank above that before it joined. Each round starts new processes
for each backend. Set `DIST_TRANSPORT=tcp` for dist over TCP; Gloo has nothing else. Measure on a machine that does nothing
else: the first line tells its load. The wheel must be a build for use (`maturin build --release`): that of `cargo xtask torch`
is several times slower, and is refused.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dist_torch import _native
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


def barrier(group):
    dist.barrier(group)


def seconds_of(call, group, calls):
    dist.barrier(group)
    began = time.perf_counter()
    for _ in range(calls):
        call(group)
    return (time.perf_counter() - began) / calls


def slowest(value):
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def compare(call, groups, rounds):
    """Times a call in both groups, in turns, and returns the cell of the table."""
    once = slowest(max(seconds_of(call, group, 2) for group in groups.values()))
    calls = max(1, min(2000, int(0.1 / once)))
    times = {backend: [] for backend in groups}
    for _ in range(rounds):
        for backend, group in groups.items():
            times[backend].append(slowest(seconds_of(call, group, calls)))
    ours, gloo = (statistics.median(times[backend]) * 1e6 for backend in ("dist", "gloo"))
    return f"{ours:.{1 if ours < 100 else 0}f} ({gloo / ours:.1f})"


def compare_operations(rank, arguments, folder):
    join(rank, arguments.ranks, "dist", folder)
    groups = {"dist": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rows = {}
    for size in arguments.sizes:
        for name, call in operations(size, arguments.ranks).items():
            rows.setdefault(name, []).append(compare(call, groups, arguments.rounds))
            if rank == 0:
                print(name, size, rows[name][-1], file=sys.stderr, flush=True)
    rows["barrier"] = [compare(barrier, groups, arguments.rounds)] + [""] * (len(arguments.sizes) - 1)
    if rank == 0:
        print_table(["µs (times Gloo's)", *map(in_words, arguments.sizes)], rows)
    dist.destroy_process_group()


def in_words(size):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def print_table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def mlp(width, layers):
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]), (64, width)


def transformer(width, layers):
    def layer():
        return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)

    return nn.Sequential(*[layer() for _ in range(layers)]), (4, 64, width)


MODELS = {
    "mlp-1M": lambda: mlp(512, 4),
    "mlp-10M": lambda: mlp(1600, 4),
    "transformer-1M": lambda: transformer(128, 5),
    "transformer-10M": lambda: transformer(384, 6),
    "mlp-100M": lambda: mlp(3536, 8),
}
BACKENDS = {"dist, shared memory": ("dist", "auto"), "dist, TCP": ("dist", "tcp"), "Gloo": ("gloo", "auto")}


def wrapped(module, strategy):
    if strategy == "DDP":
        return DistributedDataParallel(module)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def resident(key):
    """Returns resident memory in MiB."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return int(re.search(rf"{key}:\s+(\d+)", file.read())[1]) / 1024


def train(rank, arguments, folder, strategy, backend, results):
    """Puts the median time of a step in milliseconds and the memory in MiB, both of the slowest or largest rank."""
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")  # The highest resident memory is counted from here on.
    before = resident("VmRSS")
    join(rank, arguments.ranks, backend, folder)
    torch.manual_seed(0)
    module, shape = MODELS[arguments.train]()
    module = wrapped(module, strategy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    inputs = torch.randn(shape)
    times = []
    for _ in range(arguments.steps):
        dist.barrier()
        began = time.perf_counter()
        module(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(slowest(time.perf_counter() - began))
    memory = slowest(resident("VmHWM") - before)
    if rank == 0:
        results.put((statistics.median(times[3:]) * 1e3, memory))
    dist.destroy_process_group()


def compare_training(arguments):
    rows = {}
    for strategy in ("DDP", "FSDP2"):
        measured = {name: [] for name in BACKENDS}
        for _ in range(arguments.rounds):
            for name, (backend, transport) in BACKENDS.items():
                os.environ["DIST_TRANSPORT"] = transport
                results = mp.get_context("fork").SimpleQueue()
                start(train, arguments, strategy, backend, results)
                measured[name].append(results.get())
        medians = [tuple(map(statistics.median, zip(*measured[name]))) for name in BACKENDS]
        rows[f"{arguments.train}, {strategy}"] = [f"{time:.1f} ms, {memory:.0f} MiB" for time, memory in medians]
    print_table(["model", *BACKENDS], rows)


def join(rank, ranks, backend, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def start(program, arguments, *more):
    """Runs a program on all ranks, which are forked from this process, because importing torch takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(program, (arguments, folder, *more), nprocs=arguments.ranks, start_method="fork")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", choices=MODELS)
    parser.add_argument("--steps", type=int, default=23)
    arguments = parser.parse_args()
    if not _native.IS_RELEASE:
        sys.exit("this wheel of dist-torch was built for tests: build one by `maturin build --release`, and install it")
    transport = os.environ.get("DIST_TRANSPORT", "auto")
    load = os.getloadavg()[0]
    print(f"{arguments.ranks} ranks, transport {transport}, {os.cpu_count()} cores, load {load:.1f}", flush=True)
    if arguments.train:
        compare_training(arguments)
    else:
        start(compare_operations, arguments)


if __name__ == "__main__":
    main()
