"""Each operation of torch.distributed against its definition, on every type of elements and kind of memory."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, run

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
WORLDS = [1, 2, 3]

SUM, AVG, PRODUCT, MIN, MAX = (getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"))
BAND, BOR, BXOR = dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR


def values_of(rank, dtype, shape=(5, 3)):
    """Returns small numbers whose sums and products are exact in every type."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 7 + rank * 3) % 4
    return (numbers + 1).to(dtype).reshape(shape)


def reduced(op, contributions):
    stacked = torch.stack(contributions)
    if op == SUM:
        return stacked.sum(0, dtype=stacked.dtype)
    if op == AVG:
        return stacked.sum(0, dtype=stacked.dtype) / len(contributions)
    if op == PRODUCT:
        return stacked.prod(0, dtype=stacked.dtype)
    if op in (MIN, MAX):
        return stacked.amin(0) if op == MIN else stacked.amax(0)
    result = contributions[0].clone()
    for other in contributions[1:]:
        result = result & other if op == BAND else result | other if op == BOR else result ^ other
    return result


REDUCTIONS = (
    [(op, dtype) for op in (SUM, PRODUCT, MIN, MAX) for dtype in FLOATS + INTEGERS]
    + [(AVG, dtype) for dtype in FLOATS + COMPLEX]
    + [(SUM, dtype) for dtype in COMPLEX]
    + [(op, dtype) for op in (BAND, BOR, BXOR) for dtype in INTEGERS + [torch.bool]]
)


def all_reductions(rank):
    world_size = dist.get_world_size()
    for op, dtype in REDUCTIONS:
        contributions = [values_of(one, dtype) for one in range(world_size)]
        expected = reduced(op, contributions)
        tensor = contributions[rank].clone()
        dist.all_reduce(tensor, op)
        torch.testing.assert_close(tensor, expected, rtol=1e-2, atol=0)
        rooted = contributions[rank].clone()
        root = world_size - 1
        dist.reduce(rooted, root, op)
        if rank == root:
            assert torch.equal(rooted, tensor), (op, dtype)
        own = tensor.new_empty(5)
        dist.reduce_scatter_tensor(own, contributions[rank].reshape(-1).repeat(world_size)[: 5 * world_size], op)
        parts = [one.reshape(-1).repeat(world_size)[: 5 * world_size].split(5)[rank] for one in contributions]
        torch.testing.assert_close(own, reduced(op, parts), rtol=1e-2, atol=0)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_reduction_of_every_type_is_right(world_size):
    run(world_size, all_reductions)


def truth_values(rank):
    for op, expected in ((SUM, True), (MAX, True), (PRODUCT, False), (MIN, False)):
        tensor = torch.tensor([rank == 0, True, False])
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == [expected, True, False], op
    return error_of(lambda: dist.all_reduce(torch.tensor([True]), AVG))


def test_sums_of_truth_values_are_truth_values():
    assert all(kind == "ValueError" and "torch.bool" in text for kind, text in run(2, truth_values))


def scaled_sum(rank):
    tensor = torch.ones(4) * (rank + 1)
    dist.all_reduce(tensor, PREMUL_SUM(0.5))
    return tensor.tolist()


PREMUL_SUM = dist.ReduceOp.PREMUL_SUM


def test_a_sum_is_multiplied_before_it_is_added():
    assert run(2, scaled_sum) == [[1.5] * 4] * 2


MOVED = FLOATS + INTEGERS + COMPLEX + [torch.bool, torch.uint16, torch.float8_e4m3fn]


def all_moves(rank):
    world_size = dist.get_world_size()
    last = world_size - 1
    for dtype in MOVED:
        of = [values_of(one, dtype) for one in range(world_size)]
        own = of[rank]
        same = lambda one, other: torch.equal(one.to(torch.complex128), other.to(torch.complex128))
        tensor = own.clone()
        dist.broadcast(tensor, last)
        assert same(tensor, of[last]), dtype
        outputs = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(outputs, own)
        assert all(map(same, outputs, of)), dtype
        whole = own.new_empty((5 * world_size, 3))
        dist.all_gather_into_tensor(whole, own)
        assert same(whole, torch.cat(of)), dtype
        # FSDP passes this rank's part of the output as the input.
        whole = own.new_empty((5 * world_size, 3))
        whole.chunk(world_size)[rank].copy_(own)
        dist.all_gather_into_tensor(whole, whole.chunk(world_size)[rank])
        assert same(whole, torch.cat(of)), dtype
        outputs = [torch.empty_like(own) for _ in range(world_size)]
        dist.gather(own, outputs if rank == last else None, dst=last)
        assert rank != last or all(map(same, outputs, of)), dtype
        output = torch.empty_like(own)
        dist.scatter(output, [one + one if dtype is torch.float32 else one for one in of] if rank == last else None, src=last)
        assert same(output, own + own if dtype is torch.float32 else own), dtype
        parts = [values_of(rank + to, dtype) for to in range(world_size)]
        outputs = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_to_all(outputs, parts)
        assert all(same(output, values_of(rank + one, dtype)) for one, output in enumerate(outputs)), dtype
        output = torch.empty_like(torch.cat(parts))
        dist.all_to_all_single(output, torch.cat(parts))
        assert same(output, torch.cat(outputs)), dtype


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_move_of_every_type_is_right(world_size):
    run(world_size, all_moves)


def parts_of_different_sizes(rank):
    world_size = dist.get_world_size()
    of = [torch.full((one + 1, 2), float(one)) for one in range(world_size)]
    outputs = [torch.empty_like(one) for one in of]
    dist.all_gather(outputs, of[rank])
    assert all(map(torch.equal, outputs, of))
    own = torch.empty(rank + 1)
    dist.reduce_scatter(own, [torch.ones(one + 1) * (rank + 1) for one in range(world_size)])
    assert own.tolist() == [world_size * (world_size + 1) / 2] * (rank + 1)
    # This rank sends `to` rows to each rank, so that it receives `rank` rows from each.
    sent, received = list(range(world_size)), [rank] * world_size
    output = torch.empty((sum(received), 2))
    dist.all_to_all_single(output, torch.full((sum(sent), 2), float(rank)), received, sent)
    assert output[:, 0].tolist() == [float(one) for one in range(world_size) for _ in range(rank)]
    return error_of(lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3), [1] * world_size, [7] * world_size))


@pytest.mark.parametrize("world_size", WORLDS)
def test_parts_may_have_different_sizes(world_size):
    assert all(kind == "ValueError" and "do not divide 3 rows" in text for kind, text in run(world_size, parts_of_different_sizes))


def unusual_memory(rank):
    base = torch.zeros(4, 6)
    columns = base[:, ::2]
    columns.fill_(rank + 1)
    dist.all_reduce(columns)
    assert base[:, ::2].eq(3).all() and base[:, 1::2].eq(0).all()
    transposed = torch.empty(3, 2).t()
    dist.broadcast(transposed if rank else torch.arange(6.0).reshape(2, 3), 0)
    assert not rank or transposed.tolist() == [[0, 1, 2], [3, 4, 5]]
    conjugate = torch.tensor([1 + 2j]).conj()
    dist.group.WORLD.allreduce([conjugate]).wait()
    assert conjugate.tolist() == [2 - 4j]
    empty = torch.empty(0)
    dist.all_reduce(empty)
    dist.all_gather([torch.empty(0), torch.empty(0)], empty)
    dist.all_gather_into_tensor(torch.empty(0), empty)
    dist.all_to_all_single(torch.empty(0), empty)
    single = torch.tensor(float(rank))
    dist.all_reduce(single)
    assert single.item() == 1
    parameter = torch.nn.Parameter(torch.ones(2, 2).t())
    dist.all_reduce(parameter)
    assert parameter.eq(2).all() and parameter.requires_grad
    return error_of(lambda: dist.all_reduce(torch.empty(2, device="meta")))


def test_tensors_may_have_gaps_or_no_elements():
    assert all(kind == "ValueError" and "meta" in text for kind, text in run(2, unusual_memory))


def coalesced(rank):
    tensors = [torch.ones(3) * (rank + 1), torch.ones(2, 2), torch.ones(1, dtype=torch.int64)]
    dist.group.WORLD.allreduce_coalesced(tensors).wait()
    assert [tensor.flatten()[0].item() for tensor in tensors] == [3, 2, 2]
    with dist._coalescing_manager(async_ops=True) as manager:
        first, second = torch.ones(2), torch.ones(3)
        dist.all_reduce(first)
        dist.all_reduce(second)
    manager.wait()
    assert first.tolist() == [2, 2] and second.tolist() == [2, 2, 2]
    outputs = [torch.empty(2), torch.empty(4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(outputs[0], torch.tensor([float(rank)]))
        dist.all_gather_into_tensor(outputs[1], torch.tensor([float(rank)] * 2))
    manager.wait()
    assert [output.tolist() for output in outputs] == [[0, 1], [0, 0, 1, 1]]


def test_many_small_tensors_are_one_operation():
    run(2, coalesced)


def objects(rank):
    gathered = [None, None]
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank * 1000})
    assert [one["rank"] for one in gathered] == [0, 1]
    shared = [("from", rank)]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [("from", 1)]
    share = [None]
    dist.scatter_object_list(share, ["half", "the other"] if rank == 0 else None, src=0)
    assert share == [["half", "the other"][rank]]
    if rank == 0:
        dist.send_object_list([{"to": 1}], dst=1)
    else:
        received = [None]
        dist.recv_object_list(received, src=0)
        assert received == [{"to": 1}]


def test_objects_are_sent_and_gathered():
    run(2, objects)


def started(rank):
    tensors = [torch.ones(1000) * (rank + 1) for _ in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    blocking = torch.ones(1)
    dist.all_reduce(blocking)  # It is made after those that were started before it.
    assert blocking.item() == 2 and all(work.is_completed() for work in works)
    for work, tensor in zip(works, tensors):
        assert work.wait() is True and tensor.eq(3).all() and work.is_success() and work.exception() is None
    doubled = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [4, 4]
    chained = dist.all_reduce(torch.ones(1), async_op=True)
    chained.wait()
    assert chained.get_future().value()[0].item() == 2
    # One rank may wait for a call that the other one only starts.
    mixed = torch.ones(1)
    work = dist.all_reduce(mixed, async_op=rank == 0)
    if work is not None:
        work.wait()
    assert mixed.item() == 2


def test_started_calls_keep_their_order_and_complete_futures():
    run(2, started)


def other_memory(rank):
    tensors = [torch.ones(100_000) for _ in range(10)]
    works = []
    for tensor in tensors:
        view = tensor[:]
        works.append(dist.all_reduce(view, async_op=True))
        # The call goes on with the memory that the tensor had.
        view.data = torch.zeros(1)
    storages = [tensor.untyped_storage() for tensor in tensors]
    del view, tensors
    for work in works:
        work.wait()
    for storage in storages:
        assert torch.empty(0).set_(storage).eq(2).all()


def test_a_tensor_may_get_other_memory_while_a_call_uses_its_own():
    run(2, other_memory)


def messages(rank):
    other = 1 - rank
    received = torch.zeros(100_000)
    work = dist.irecv(received, other)
    dist.send(torch.full((100_000,), float(rank)), other)
    work.wait()
    assert received.eq(other).all()
    numbers = [torch.zeros(1) for _ in range(4)]
    works = [dist.irecv(number, other, tag=tag) for tag, number in enumerate(numbers)]
    for tag in range(4):
        dist.isend(torch.tensor([tag * 10.0]), other, tag=tag).wait()
    for work in works:
        work.wait()
    assert [number.item() for number in numbers] == [0, 10, 20, 30]
    halo = [torch.zeros(3), torch.zeros(3)]
    exchanged = [dist.P2POp(dist.irecv, halo[0], other), dist.P2POp(dist.isend, torch.ones(3) * rank, other)]
    for work in dist.batch_isend_irecv(exchanged):
        work.wait()
    assert halo[0].eq(other).all()
    return error_of(lambda: dist.group.WORLD.send([received], rank, 0)), error_of(lambda: dist.group.WORLD.send([received], other, -1))


def test_messages_wait_for_their_own_peer_only():
    for itself, negative in run(2, messages):
        assert itself[0] == "ValueError" and "this rank itself" in itself[1]
        assert negative[0] == "ValueError" and "tag" in negative[1]


def messages_with_tags(rank):
    numbers = {tag: torch.zeros(length) for tag, length in ((3, 1), (7, 100_000), (5, 0))}
    if rank == 0:
        works = [dist.isend(torch.full_like(number, float(tag)), 1, tag=tag) for tag, number in numbers.items()]
        for work in works:
            work.wait()
        return
    for tag in (5, 7, 3):
        assert dist.recv(numbers[tag], 0, tag=tag) == 0
        assert numbers[tag].eq(tag).all()


def test_messages_with_other_tags_are_kept_for_later_receives():
    run(2, messages_with_tags)


def from_any_source(rank):
    others = [one for one in range(dist.get_world_size()) if one != 0]
    pair = dist.new_group([1, 2])
    if rank == 0:
        # Messages with another tag wait, and a rank that has left sends nothing.
        received, senders = torch.zeros(1000), []
        for _ in others:
            senders.append(dist.recv(received, tag=1))
            assert received.eq(senders[-1]).all()
        assert sorted(senders) == others
        works = [dist.irecv(torch.zeros(1), tag=2) for _ in others]
        for work in works:
            work.wait()
        assert sorted(work.source_rank() for work in works) == others
        for one in others:
            assert dist.recv(received, one, tag=3) == one and received.eq(one).all()
        return
    dist.send(torch.full((1000,), float(rank)), 0, tag=3) if rank == 1 else None
    dist.send(torch.full((1000,), float(rank)), 0, tag=1)
    dist.send(torch.full((1,), float(rank)), 0, tag=2)
    if rank != 1:
        dist.send(torch.full((1000,), float(rank)), 0, tag=3)
    if rank == 2:
        dist.send(torch.ones(1), 1, group=pair)
    if rank == 1:
        assert dist.recv(torch.zeros(1), group=pair) == 2


def test_messages_are_received_from_any_source():
    run(4, from_any_source)


def groups(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for members, pair in zip(([0, 1], [1, 2]), pairs):
        if rank in members:
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=pair)
            assert tensor.item() == sum(members)
            dist.broadcast(tensor, members[1], group=pair)
    part = dist.split_group(split_ranks=[[2, 0], [1]])
    assert dist.get_process_group_ranks(part) == ([1] if rank == 1 else [2, 0])
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=part)
    assert tensor.item() == (1 if rank == 1 else 2)
    mesh = dist.init_device_mesh("cpu", (3,))
    dist.all_reduce(tensor, group=mesh.get_group())
    dist.destroy_process_group(part)
    dist.barrier()


def test_groups_splits_and_meshes_have_their_own_calls():
    run(3, groups)


def local_groups(rank):
    if rank == 0:
        return
    pair = dist.new_group([1, 2], use_local_synchronization=True)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=pair)
    assert tensor.item() == 3
    other = 3 - rank
    exchanged = [dist.P2POp(dist.irecv, tensor, other, pair), dist.P2POp(dist.isend, torch.ones(1) * rank, other, pair)]
    for work in dist.batch_isend_irecv(exchanged):
        work.wait()
    assert tensor.item() == other


def test_a_group_is_made_by_its_members_only():
    run(3, local_groups)


def in_threads(rank):
    groups = [dist.new_group() for _ in range(3)]
    totals = [0.0] * len(groups)

    def reduce_often(index):
        for number in range(100):
            tensor = torch.tensor([float(index + number)])
            dist.all_reduce(tensor, group=groups[index])
            totals[index] += tensor.item()

    threads = [threading.Thread(target=reduce_often, args=(index,)) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return totals


def test_threads_use_groups_of_their_own_at_the_same_time():
    assert run(2, in_threads) == [[2.0 * sum(range(index, index + 100)) for index in range(3)]] * 2


def twice(rank):
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("dist", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def test_a_program_can_leave_and_join_again():
    assert run(2, twice) == [2, 2]


def sparse(rank):
    tensor = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (4,)).coalesce()
    dist.all_reduce(tensor)
    return tensor.to_dense().tolist()


def test_sparse_tensors_are_added():
    assert run(2, sparse) == [[2, 2, 2, 0]] * 2


def timeouts(rank):
    options = dist.distributed_c10d.AllreduceOptions()
    options.timeout = timedelta(seconds=7)
    group = dist.group.WORLD
    assert group._limit(options.timeout) == 7000 and group._limit(timedelta(milliseconds=-1)) == 30_000
    group.set_timeout(timedelta(seconds=9))
    assert group._limit(None) == 9000


def test_calls_have_their_own_timeout_or_that_of_the_group():
    run(1, timeouts)
