"""Runs PyTorch's own distributed tests with Gloo or with dist.

    python pytorch_suite.py BACKEND RANKS [--only FILE] [--filter TEXT] [--out FILE]

The tests are in the wheel of torch (`torch.testing._internal.distributed.distributed_test`). Many of them run only if
the backend is called "gloo", so dist takes that name here. Each rank is forked from
this process, which has imported torch, since importing it takes longer than most tests. `COMPARE_NAMES` lists the
tests for which the name is patched besides.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import unittest
import unittest.mock


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=["gloo", "dist"])
    parser.add_argument("ranks", type=int)
    parser.add_argument("--filter", default="", help="run only tests whose name contains this text")
    parser.add_argument("--only", help="run only the tests that this file names, one per line")
    parser.add_argument("--out", help="write the outcomes of all tests to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(arguments, folder)
    counts = {kind: sum(1 for one in outcomes.values() if one["kind"] == kind) for kind in ("passed", "failed", "skipped")}
    for name, outcome in outcomes.items():
        if outcome["kind"] == "failed":
            print(f"failed: {name}: {outcome['why']}")
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(outcomes, file, indent=1, sort_keys=True)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    sys.exit(1 if counts["failed"] else 0)


def run(arguments, folder):
    """Returns for each test its outcome and, if it did not pass, why."""
    environment = {"BACKEND": "gloo", "WORLD_SIZE": str(arguments.ranks), "TEMP_DIR": folder, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(environment, OMP_NUM_THREADS="1", DIST_COSTS="off")
    os.environ.pop("MASTER_PORT", None)
    import torch

    torch.set_num_threads(1)
    if arguments.backend == "dist":
        take_the_name_of_gloo()
        run_what_gloo_skips()
    case = test_case()
    names = [name for name in unittest.TestLoader().getTestCaseNames(case) if arguments.filter in name]
    if arguments.only:
        with open(arguments.only, encoding="utf-8") as file:
            wanted = {line.strip() for line in file if line.strip() and not line.startswith("#")}
        unknown = wanted.difference(names)
        if unknown:
            sys.exit(f"{arguments.only} names tests that do not exist: {sorted(unknown)}")
        names = [name for name in names if name in wanted]
    result = Outcomes()
    for name in names:
        case(name).run(result)
    return result.outcomes


def take_the_name_of_gloo():
    """Lets dist be created, and shown in the profiler, by the name that tests look for."""
    from dist_torch import process_group
    from torch.distributed import Backend
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    process_group._Operations.label = "gloo"
    Backend.register_backend("gloo", process_group.ProcessGroup.create, extended_api=True, devices=["cpu"])
    for name in COMPARE_NAMES:
        test = getattr(DistributedTest._DistTestBase, name)
        patch = unittest.mock.patch("torch.distributed.get_backend", lambda group=None: "dist")
        setattr(DistributedTest._DistTestBase, name, patch(test))


def run_what_gloo_skips():
    """Lets tests run that are skipped for want of a feature which dist has."""
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    base = DistributedTest._DistTestBase
    for name in dir(base):
        test = getattr(base, name)
        if getattr(test, "__unittest_skip_why__", None) in ABSENT_IN_GLOO:
            test.__unittest_skip__ = False


# The reasons for which tests on the CPU are skipped with Gloo.
ABSENT_IN_GLOO = ["Only MPI supports CPU all_to_all_single", "Only MPI supports all_to_all"]

# Tests that compare the name of the backend in a log with the name by which it was created.
COMPARE_NAMES = ["test_ddp_logging_data_cpu"]


def test_case():
    import torch
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    common_distributed.TIMEOUT_DEFAULT = 90

    class TestDistributed(TestDistBackend, DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TestDistributed


class Outcomes(unittest.TestResult):
    """Collects the outcome of each test."""

    def __init__(self):
        super().__init__()
        self.outcomes = {}
        self.began = 0.0

    def startTest(self, test):
        super().startTest(test)
        self.began = time.perf_counter()

    def record(self, test, kind, why=""):
        name = test.id().split(".")[-1]
        self.outcomes[name] = {"kind": kind, "why": why}
        print(f"{kind:8}{time.perf_counter() - self.began:7.1f} s  {name}  {why}", file=sys.stderr, flush=True)

    def addSuccess(self, test):
        self.record(test, "passed")

    def addSkip(self, test, reason):
        self.record(test, "skipped", reason)

    def addFailure(self, test, error):
        self.record(test, "failed", reason_of(error[1]))

    addError = addFailure


def reason_of(error):
    """Returns the line of a traceback that names the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0] and "exiting process" not in line]
    return (named or lines or [type(error).__name__])[-1][:300]


if __name__ == "__main__":
    main()
