"""Ways to train one model with PyTorch: time of a step and memory, printed as `step_time` of dist-candle prints them.

usage: train.py RANKS MODEL MODES, as in: train.py 2 mlp-10M ddp,fsdp

The modes: alone, one rank; local, each rank by itself; ddp; fsdp, where each layer is a unit of fully_shard; zero2, the
same with parameters kept from forward to backward. Each has processes of its own, with one thread for each rank, and Gloo
over loopback TCP.
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
from torch import nn
from torch.distributed.fsdp import fully_shard

WARMUP, STEPS, STEPS_OF_LARGE = 3, 30, 10

# Width and number of layers.
SIZES = {
    "mlp-1M": (512, 4),
    "transformer-1M": (128, 5),
    "mlp-10M": (1600, 4),
    "transformer-10M": (384, 6),
    "mlp-100M": (3536, 8),
}


def build(name):
    """A model and one micro-batch."""
    width, layers = SIZES[name]
    if name.startswith("transformer"):
        options = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        blocks = [nn.TransformerEncoderLayer(width, **options) for _ in range(layers)]
        return nn.Sequential(*blocks), torch.randn(4, 64, width)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks), torch.randn(64, width)


def distribute(model, mode, ranks):
    if mode in ("alone", "local"):
        return model
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = dist.init_device_mesh("cpu", (ranks,))
    for unit in [*model, model]:
        # The last layer's backward comes at once.
        fully_shard(unit, mesh=mesh, reshard_after_forward=mode == "fsdp" and unit is not model[-1])
    return model


def resident_mib(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(key))


def work(rank, ranks, port, name, mode):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    before = resident_mib("VmRSS")
    torch.manual_seed(0)
    model, batch = build(name)
    size = sum(4 * parameter.numel() for parameter in model.parameters())
    model = distribute(model, mode, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the highest is counted anew from here on
    times = []
    for _ in range(WARMUP + (STEPS_OF_LARGE if name == "mlp-100M" else STEPS)):
        dist.barrier()
        start = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(1e6 * (time.perf_counter() - start))
    times = torch.tensor(times[WARMUP:])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    peak = torch.tensor([resident_mib("VmHWM") - before])
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    dist.destroy_process_group()
    if rank == 0:
        times = times.tolist()
        line = {"peer": "torch", "transport": "gloo", "op": f"step-{mode}-{name}", "ranks": ranks, "bytes": size}
        line |= {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
        line |= {"algbw_GBps": size / line["median_us"] / 1e3, "samples": len(times), "peak_MiB": peak.item()}
        print(json.dumps(line), flush=True)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    name = sys.argv[2]
    for mode in sys.argv[3].split(","):
        ranks = 1 if mode == "alone" else int(sys.argv[1])
        arguments = (ranks, free_port(), name, mode)
        torch.multiprocessing.start_processes(work, arguments, nprocs=ranks, start_method="fork")
