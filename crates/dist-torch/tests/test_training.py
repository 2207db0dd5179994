"""The ways of PyTorch to train on several ranks run on dist unchanged, with the results of one process."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from ranks import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).double()


def batch():
    torch.manual_seed(1)
    return torch.randn(12, 6, dtype=torch.float64)


def train(module, inputs, steps=3):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for _ in range(steps):
        module(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def alone():
    module = model()
    train(module, batch())
    return [parameter.detach() for parameter in module.parameters()]


def own_part(rank):
    return batch().chunk(dist.get_world_size())[rank]


def full(parameter):
    parameter = parameter.detach()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def check(module):
    for parameter, expected in zip(module.parameters(), alone(), strict=True):
        torch.testing.assert_close(full(parameter), expected)


def data_parallel(rank):
    module = DistributedDataParallel(model())
    train(module, own_part(rank))
    check(module)


def data_parallel_with_hook(rank):
    module = DistributedDataParallel(model())
    ranks = dist.get_world_size()

    def hook(state, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0].div_(ranks))

    module.register_comm_hook(None, hook)
    train(module, own_part(rank))
    check(module)


def fully_sharded(rank):
    module = model()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    train(module, own_part(rank))
    check(module)


def tensor_parallel(rank):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    module = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(module, batch())
    check(module)


def sharded_checkpoint(rank, folder):
    module = model()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(module, mesh=mesh)
    train(module, own_part(rank))
    checkpoints.save({"model": get_model_state_dict(module)}, checkpoint_id=folder)
    loaded = DistributedDataParallel(model())
    state = {"model": get_model_state_dict(loaded)}
    checkpoints.load(state, checkpoint_id=folder)
    set_model_state_dict(loaded, state["model"])
    check(loaded)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("program", [data_parallel, data_parallel_with_hook, fully_sharded, tensor_parallel])
def test_training_gives_the_result_of_one_process(program, world_size):
    run(world_size, program)


def test_a_sharded_checkpoint_is_loaded_by_another_strategy():
    with tempfile.TemporaryDirectory() as folder:
        run(2, sharded_checkpoint, folder)


def pipeline(rank):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    module = model()
    layers = module[:2] if rank == 0 else module[2:]
    stage = PipelineStage(layers, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: output.square().mean())
    losses = []
    if rank == 0:
        schedule.step(batch())
    else:
        schedule.step(target=torch.zeros(12, 3, dtype=torch.float64), losses=losses)
    expected = model()
    for part in batch().chunk(2):
        (expected(part).square().mean() / 2).backward()
    wanted = expected[:2] if rank == 0 else expected[2:]
    for parameter, other in zip(layers.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_a_pipeline_gives_the_gradients_of_one_process():
    run(2, pipeline)


def sums(rank, transport_independent):
    torch.manual_seed(rank)
    tensor = torch.randn(10_000)
    dist.all_reduce(tensor)
    return tensor.numpy().tobytes()


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_have_the_same_bits_over_tcp_and_shared_memory(world_size, monkeypatch):
    results = set()
    for transport in ("tcp", "auto"):
        monkeypatch.setenv("DIST_TRANSPORT", transport)
        results.update(run(world_size, sums, transport))
    assert len(results) == 1
