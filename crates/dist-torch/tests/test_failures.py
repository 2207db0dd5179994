"""What a program sees when something goes wrong: exceptions that name the rank, the call and what to do."""

import gc
import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, run


def different_lengths(rank):
    return error_of(lambda: dist.all_reduce(torch.ones(2 + rank)))


def different_calls(rank):
    call = dist.barrier if rank == 0 else lambda: dist.all_reduce(torch.ones(3))
    return error_of(call)


def different_types(rank):
    return error_of(lambda: dist.all_reduce(torch.ones(2, dtype=[torch.float32, torch.int64][rank])))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (different_lengths, ["2 f32", "3 f32", "rank 0", "rank 1"]),
        (different_calls, ["barrier", "all_reduce", "rank 0", "rank 1"]),
        (different_types, ["f32", "i64", "rank 0", "rank 1"]),
    ],
)
def test_calls_that_differ_are_both_named_on_every_rank(program, words):
    for kind, text in run(2, program):
        assert kind == "DistBackendError", text
        assert all(word in text or word.replace("rank ", "this rank") in text for word in words) or "this rank" in text, text


def one_dies(rank):
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: dist.all_reduce(torch.ones(1)))


def test_a_killed_rank_is_named():
    results = run(3, one_dies, may_die={1})
    for kind, text in (results[0], results[2]):
        assert kind == "DistBackendError" and "rank 1" in text, text


def one_is_late(rank):
    # The group has a job of its own, so that the world outlives its abort.
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    result = error_of(lambda: dist.barrier(group)) if rank == 0 else None
    dist.barrier()
    return result


def test_a_late_rank_is_named_with_the_limit():
    kind, text = run(2, one_is_late)[0]
    assert kind == "DistBackendError" and "rank 1" in text and "Timed out" in text, text


def nobody_receives(rank):
    if rank == 0:
        work = dist.irecv(torch.ones(1), 1)
        result = error_of(lambda: work.wait(timedelta(milliseconds=20)))
        dist.barrier()
        work.wait()
        return result
    dist.barrier()
    dist.send(torch.ones(1), 0)


def test_a_limit_of_wait_ends_the_wait_and_not_the_call():
    kind, text = run(2, nobody_receives)[0]
    assert kind == "DistBackendError" and "The call goes on" in text


def forked(rank):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        kind, text = error_of(lambda: dist.all_reduce(torch.ones(1)))
        os.write(writer, f"{kind}: {text}".encode())
        # The child drops what it has of the group. That must not make the parent leave.
        dist.destroy_process_group()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reader, 10_000).decode()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return text, tensor.item()


def test_a_child_of_fork_gets_an_error_and_the_parent_goes_on():
    for text, total in run(2, forked):
        assert "DistBackendError" in text and "was forked from process" in text and total == 2


def interrupted(rank):
    dist.barrier()
    if rank == 0:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return error_of(lambda: dist.all_reduce(torch.ones(1)))
    return error_of(lambda: dist.recv(torch.ones(1), 0))


def test_ctrl_c_ends_a_wait_and_the_others_are_told():
    (kind, _), (other_kind, text) = run(2, interrupted)
    assert kind == "KeyboardInterrupt"
    assert other_kind == "DistBackendError" and "rank 0" in text and "SIGINT" in text, text


def interrupted_in_a_child(rank, folder):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.destroy_process_group()
            store = dist.FileStore(os.path.join(folder, "store of the children"), 2)
            dist.init_process_group("dist", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
            os.write(writer, interrupted(rank)[0].encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 100).decode()


def test_ctrl_c_ends_a_wait_in_a_child_of_fork_that_has_a_group_of_its_own(tmp_path):
    assert run(2, interrupted_in_a_child, str(tmp_path)) == ["KeyboardInterrupt", "DistBackendError"]


def wrong_tag(rank):
    # The group has a job of its own, so that the world outlives its abort.
    group = dist.new_group(timeout=timedelta(milliseconds=500))
    result = None
    if rank == 0:
        dist.isend(torch.ones(1), 1, group=group, tag=5)
    else:
        result = error_of(lambda: dist.recv(torch.ones(1), 0, group=group, tag=7))
    dist.barrier()
    return result


def test_a_message_with_another_tag_is_named_at_the_deadline():
    kind, text = run(2, wrong_tag)[1]
    assert kind == "DistBackendError" and "tag 7" in text and "tag 5" in text and "rank 0" in text, text


def nobody_sends(rank):
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    if rank == 0:
        result = error_of(lambda: dist.recv(torch.ones(1), group=group, tag=3))
        store.set("nobody has sent", "")
    else:
        store.wait(["nobody has sent"])
        result = error_of(lambda: dist.barrier(group))
    dist.barrier()
    return result


def test_a_receive_from_any_source_names_the_ranks_that_sent_nothing_and_tells_them():
    (kind, text), *others = run(3, nobody_sends)
    assert kind == "DistBackendError" and "tag 3" in text and "[1, 2]" in text and "Timed out" in text, text
    for kind, text in others:
        assert kind == "DistBackendError" and "rank 0" in text and "from any source" in text, text


def one_of_the_sources_dies(rank):
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        return error_of(dist.barrier)
    return error_of(lambda: dist.recv(torch.ones(1)))


def test_a_killed_rank_ends_a_receive_from_any_source():
    kind, text = run(3, one_of_the_sources_dies, may_die={1})[0]
    assert kind == "DistBackendError" and "rank 1" in text, text


def refusals(rank):
    group = dist.group.WORLD
    shared, without_memory = torch.ones(2), torch.ones(2)
    without_memory.untyped_storage().resize_(0)
    return [
        error_of(lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))),
        error_of(lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.PRODUCT)),
        error_of(lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG)),
        error_of(lambda: group.all_gather_single(torch.ones(3), torch.ones(2)).wait()),
        error_of(lambda: group.allgather([[torch.ones(2)]], [torch.ones(2)])),
        error_of(lambda: group.all_gather_single(torch.ones(4), torch.ones(2, dtype=torch.int32))),
        error_of(lambda: dist.all_reduce_coalesced([shared, shared[1:]])),
        error_of(lambda: dist.all_reduce(without_memory)),
        error_of(lambda: dist.all_reduce(torch.frombuffer(bytearray(13), dtype=torch.float32, offset=1))),
    ]


def test_arguments_that_make_no_sense_are_refused():
    for errors in run(2, refusals):
        assert [kind for kind, _ in errors] == ["ValueError"] * len(errors), errors


def absent(rank):
    store = dist.distributed_c10d._get_default_store()
    if rank != 0:
        return store.wait(["rank 0 is done"])
    result = error_of(lambda: dist.monitored_barrier(timeout=timedelta(milliseconds=200), wait_all_ranks=True))
    store.set("rank 0 is done", "")
    return result


def test_a_monitored_barrier_names_all_absent_ranks():
    kind, text = run(3, absent)[0]
    assert kind == "DistBackendError" and text.startswith("Ranks 1, 2 failed to pass monitoredBarrier"), text
