"""The ways to start the ranks of a job: torchrun, `mp.spawn` and by hand, and ranks that count as two hosts."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import textwrap

import torch
import torch.multiprocessing as mp

PROGRAM = textwrap.dedent("""
    import torch
    import torch.distributed as dist

    dist.init_process_group("dist")
    tensor = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3, 3, 3], tensor
    other = 1 - dist.get_rank()
    received = torch.zeros(1)
    work = dist.irecv(received, other)
    dist.send(torch.tensor([float(dist.get_rank())]), other)
    work.wait()
    assert received.item() == other
    dist.destroy_process_group()
    print("rank", 1 - other, "is done")
""")


def free_port():
    """Returns a port below those that the system gives to outgoing connections."""
    while True:
        port = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def by_hand(tmp_path, **of_rank):
    """Starts two ranks by their environment. `of_rank` has variables of which each rank has its own value."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = []
    for rank in range(2):
        own = {"RANK": str(rank)} | {name: values[rank] for name, values in of_rank.items()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen([sys.executable, str(program)], env=common | own, **pipes))
    for rank, process in enumerate(processes):
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and f"rank {rank} is done" in output, output


def test_ranks_are_started_by_hand(tmp_path):
    by_hand(tmp_path)


def test_ranks_of_two_hosts_are_connected_by_tcp(tmp_path):
    by_hand(tmp_path, DIST_HOST_ID=["one host", "another host"])


def test_ranks_are_started_by_torchrun(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "rank 0 is done" in done.stdout and "rank 1 is done" in done.stdout, done.stderr


def spawned(rank, port):
    import torch.distributed as dist

    dist.init_process_group("dist", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2
    dist.destroy_process_group()


def test_ranks_are_started_by_spawn():
    mp.spawn(spawned, (free_port(),), nprocs=2)
