"""Prints what rank 0 sees of three faults, with Gloo and with dist, as the table in the README.

    python faults.py [--write]
"""

import os
import pathlib
import re
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import error_of, run

README = pathlib.Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- faults -->\n", "<!-- end of faults -->\n"
LIMIT = timedelta(seconds=3)


def timed(call):
    began = time.perf_counter()
    kind, text = error_of(call)
    return f"{kind}: {text}", time.perf_counter() - began


def killed(rank):
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return timed(lambda: dist.all_reduce(torch.ones(4)))


def mismatched(rank):
    dist.barrier()
    result = timed(lambda: dist.all_reduce(torch.ones(4 + 4 * rank)))
    return result


def late(rank):
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 1:
        return store.wait(["done"])
    result = timed(lambda: dist.all_reduce(torch.ones(4)))
    store.set("done", "")
    return result


FAULTS = [
    ("rank 1 is killed while rank 0 waits", killed),
    ("rank 0 reduces 4 numbers, rank 1 reduces 8", mismatched),
    (f"rank 1 does not come within {LIMIT.seconds} s", late),
]


def main():
    rows = ["| fault | Gloo | dist |", "|---|---|---|"]
    for name, program in FAULTS:
        cells = [cell(program, backend) for backend in ("gloo", "dist")]
        rows.append(f"| {name} | {cells[0]} | {cells[1]} |")
    table = "\n".join(rows)
    print(table)
    if "--write" in sys.argv:
        before, rest = README.read_text().split(BEGIN)
        README.write_text(before + BEGIN + "\n" + table + "\n\n" + END + rest.split(END)[1])


def cell(program, backend):
    result = run(2, program, backend=backend, timeout=LIMIT, may_die={0, 1})[0]
    if result is None:
        return "the process ends by a signal, without an exception"
    text, seconds = result
    text = re.sub(r"\[[^]]*\.cc:\d+\] ", "", text.split("\n")[0]).replace("|", "/")
    return f"after {seconds:.1f} s: `{text}`"


if __name__ == "__main__":
    main()
