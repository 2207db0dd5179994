"""The process group of the backend ``dist``."""

import weakref
from datetime import timedelta
from multiprocessing.util import Finalize

import torch
from torch._C import _distributed_c10d as c10d

from . import rendezvous
from .profiling import profiled
from .tensors import Parts, Target, counts_of_rows, is_reducible, name_of, source
from .work import Work

_Op = c10d.ReduceOp.RedOpType

_OPS = {
    _Op.SUM: "sum",
    _Op.AVG: "mean",
    _Op.PRODUCT: "product",
    _Op.MIN: "min",
    _Op.MAX: "max",
    _Op.BAND: "and",
    _Op.BOR: "or",
    _Op.BXOR: "xor",
    _Op.PREMUL_SUM: "pre_mul_sum",
}

# Truth values are bytes of 0 and 1.
_OPS_OF_BOOL = {"sum": "or", "max": "or", "or": "or", "product": "and", "min": "and", "and": "and", "xor": "xor"}

_OPS_OF_COMPLEX = {"sum", "mean", "product", "pre_mul_sum"}


def _first_argument(arguments):
    return _flat(arguments[0])


def _second_argument(arguments):
    return _flat(arguments[1])


def _flat(tensors):
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for one in tensors for tensor in _flat(one)]


class _Operations:
    """The operations of torch.distributed on the Rust side's group `_group`.

    The names and the arguments are those by which PyTorch calls them.
    """

    # The beginning of the names of events in the profiler.
    label = "dist"

    @profiled("broadcast", _first_argument)
    def broadcast(self, tensors, opts=None, *, root=0, timeout=None):
        opts = opts if isinstance(opts, c10d.BroadcastOptions) else _options(c10d.BroadcastOptions, timeout, rootRank=root)
        (tensor,) = _listed(tensors)
        target = Target(tensor, is_read=True)
        return self._call("broadcast", (opts.rootRank,), [target.memory], opts, [tensor], target)

    @profiled("all_reduce", _first_argument)
    def allreduce(self, tensors, opts=None, *, op=_Op.SUM, timeout=None):
        if not isinstance(opts, c10d.AllreduceOptions):
            opts = _options(c10d.AllreduceOptions, timeout, reduceOp=op if opts is None else opts)
        (tensor,) = _listed(tensors)
        if tensor.is_sparse:
            return self._sparse_all_reduce(tensor, opts)
        return self._all_reduce([tensor], opts)

    @profiled("all_reduce", _first_argument)
    def allreduce_coalesced(self, tensors, opts=None):
        opts = opts or c10d.AllreduceCoalescedOptions()
        if len({tensor.dtype for tensor in tensors}) == 1:
            return self._all_reduce(tensors, opts)
        return self._together([self._all_reduce([tensor], opts) for tensor in tensors], tensors)

    def _all_reduce(self, tensors, opts):
        op = _reduction(opts.reduceOp, tensors[0].dtype)
        targets = [Target(tensor, is_read=True, is_reduced=True) for tensor in tensors]
        return self._call("all_reduce", (op,), [target.memory for target in targets], opts, tensors, *targets)

    @profiled("reduce", _first_argument)
    def reduce(self, tensors, opts=None, *, root=0, op=_Op.SUM, timeout=None):
        if not isinstance(opts, c10d.ReduceOptions):
            opts = _options(c10d.ReduceOptions, timeout, rootRank=root, reduceOp=op)
        (tensor,) = _listed(tensors)
        op = _reduction(opts.reduceOp, tensor.dtype)
        target = Target(tensor, is_read=True, is_reduced=True)
        return self._call("reduce", (op, opts.rootRank), [target.memory], opts, [tensor], target)

    @profiled("all_gather", _second_argument)
    def allgather(self, output_tensors, input_tensors, opts=None, *, timeout=None):
        if isinstance(input_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        opts = opts or _options(c10d.AllgatherOptions, timeout)
        (outputs,), (tensor,) = output_tensors, input_tensors
        self._check_count(outputs, "outputs")
        _check_type([tensor, *outputs])
        parts = Parts(outputs, is_read=False)
        counts = None if parts.is_even else parts.counts
        return self._call("all_gather", (counts,), [source(tensor), parts.memory], opts, outputs, parts)

    @profiled("all_gather", _second_argument)
    def all_gather_single(self, output, input, opts=None, *, timeout=None):
        opts = opts or _options(c10d.AllgatherOptions, timeout)
        _check_type([input, output])
        target = Target(output)
        return self._call("all_gather", (None,), [source(input), target.memory], opts, [output], target)

    _allgather_base = all_gather_single

    @profiled("all_gather", _second_argument, lambda arguments: len(arguments[1]))
    def allgather_coalesced(self, output_lists, input_list, opts=None):
        works = [self.allgather([outputs], [tensor], opts) for outputs, tensor in zip(zip(*output_lists), input_list)]
        return self._together(works, [tensor for outputs in output_lists for tensor in outputs])

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        works = [self.all_gather_single(output, input, opts) for output, input in zip(outputs, inputs, strict=True)]
        return self._together(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @profiled("gather", _second_argument)
    def gather(self, output_tensors, input_tensors, opts=None, *, root=0, timeout=None):
        if isinstance(input_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors] if output_tensors else [], [input_tensors]
        opts = opts if isinstance(opts, c10d.GatherOptions) else _options(c10d.GatherOptions, timeout, rootRank=root)
        (tensor,) = input_tensors
        outputs = output_tensors[0] if opts.rootRank == self.rank() else []
        if opts.rootRank == self.rank():
            self._check_count(outputs, "outputs")
        _check_type([tensor, *outputs])
        parts = Parts(outputs, is_read=False) if outputs else Target(tensor.new_empty(0))
        return self._call("gather", (opts.rootRank,), [source(tensor), parts.memory], opts, outputs, parts)

    @profiled("gather", _second_argument)
    def gather_single(self, output, input, opts=None):
        opts = opts or c10d.GatherOptions()
        is_root = opts.rootRank == self.rank()
        target = Target(output if is_root and output is not None else input.new_empty(0))
        return self._call("gather", (opts.rootRank,), [source(input), target.memory], opts, [output], target)

    gather_into_tensor = gather_single

    @profiled("scatter", _second_argument)
    def scatter(self, output_tensors, input_tensors, opts=None, *, root=0, timeout=None):
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors] if input_tensors else []
        opts = opts if isinstance(opts, c10d.ScatterOptions) else _options(c10d.ScatterOptions, timeout, rootRank=root)
        (tensor,) = output_tensors
        inputs = input_tensors[0] if opts.rootRank == self.rank() else []
        if opts.rootRank == self.rank():
            self._check_count(inputs, "inputs")
        _check_type([tensor, *inputs])
        memory = Parts(inputs, is_read=True).memory if inputs else source(tensor.new_empty(0))
        target = Target(tensor)
        return self._call("scatter", (opts.rootRank,), [memory, target.memory], opts, [tensor], target)

    @profiled("reduce_scatter", _second_argument)
    def reduce_scatter(self, output_tensors, input_tensors, opts=None, *, op=_Op.SUM, timeout=None):
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        if not isinstance(opts, c10d.ReduceScatterOptions):
            opts = _options(c10d.ReduceScatterOptions, timeout, reduceOp=op)
        (output,), (inputs,) = output_tensors, input_tensors
        self._check_count(inputs, "inputs")
        _check_type([output, *inputs])
        parts = Parts(inputs, is_read=True, is_reduced=True)
        counts = None if parts.is_even else parts.counts
        return self._reduce_scatter(output, parts.memory, counts, opts)

    @profiled("reduce_scatter", _second_argument)
    def reduce_scatter_single(self, output, input, opts=None, *, op=_Op.SUM, timeout=None):
        if not isinstance(opts, c10d.ReduceScatterOptions):
            opts = _options(c10d.ReduceScatterOptions, timeout, reduceOp=op)
        _check_type([output, input])
        return self._reduce_scatter(output, source(input, is_reduced=True), None, opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, output, memory, counts, opts):
        op = _reduction(opts.reduceOp, output.dtype)
        target = Target(output, is_reduced=True)
        return self._call("reduce_scatter", (op, counts), [memory, target.memory], opts, [output], target)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        works = [self.reduce_scatter_single(output, input, opts) for output, input in zip(outputs, inputs, strict=True)]
        return self._together(works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @profiled("all_to_all", _second_argument)
    def all_to_all_single(self, output, input, output_split_sizes, input_split_sizes, opts=None, *, timeout=None):
        opts = opts or _options(c10d.AllToAllOptions, timeout)
        _check_type([output, input])
        counts = None
        if output_split_sizes or input_split_sizes:
            received = self._rows(output, output_split_sizes)
            counts = [counts_of_rows(self._rows(input, input_split_sizes), input), counts_of_rows(received, output)]
        target = Target(output)
        return self._call("all_to_all", (counts,), [source(input), target.memory], opts, [output], target)

    alltoall_base = all_to_all_single

    @profiled("all_to_all", _second_argument)
    def alltoall(self, output_tensors, input_tensors, opts=None, *, timeout=None):
        opts = opts or _options(c10d.AllToAllOptions, timeout)
        self._check_count(output_tensors, "outputs")
        self._check_count(input_tensors, "inputs")
        _check_type([*output_tensors, *input_tensors])
        inputs, outputs = Parts(input_tensors, is_read=True), Parts(output_tensors, is_read=False)
        counts = [inputs.counts, outputs.counts]
        return self._call("all_to_all", (counts,), [inputs.memory, outputs.memory], opts, output_tensors, outputs)

    @profiled("send", _first_argument)
    def send(self, tensors, dstRank, tag=0):
        (tensor,) = tensors
        return self._call("send", (dstRank, tag), [source(tensor)], _MESSAGE, tensors)

    @profiled("recv", _first_argument)
    def recv(self, tensors, srcRank, tag=0):
        (tensor,) = tensors
        target = Target(tensor)
        work = self._call("receive", (srcRank, tag), [target.memory], _MESSAGE, tensors, target)
        work.sender = srcRank
        return work

    @profiled("recvAnySource", _first_argument)
    def recv_anysource(self, tensors, tag=0):
        """Receives from the first rank that sends a message with this tag."""
        (tensor,) = tensors
        target = Target(tensor)
        return self._call("receive_any", (tag,), [target.memory], _MESSAGE, tensors, target)

    recvAnysource = recv_anysource

    def barrier(self, opts=None, *, timeout=None):
        opts = opts if isinstance(opts, c10d.BarrierOptions) else _options(c10d.BarrierOptions, timeout)
        return self._call("barrier", (), [], opts, [])

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """Waits for all ranks. Every rank that came gets an error that names those that did not."""
        if isinstance(timeout, c10d.BarrierOptions):
            timeout = timeout.timeout
        if timeout == timedelta(0):
            raise rendezvous.c10d_error(f"Rank {self.rank()} timed out in monitoredBarrier: the given timeout is 0")
        self._group.call("monitored_barrier", (wait_all_ranks,), "u8", [], (self._limit(timeout), False, None))

    def allreduce_sparse(self, tensors, opts=None):
        (tensor,) = _listed(tensors)
        return self._sparse_all_reduce(tensor, opts or c10d.AllreduceOptions())

    def _sparse_all_reduce(self, tensor, opts):
        """Adds sparse tensors: gathers the indices and values of all ranks. It returns when that is done."""
        if _reduction(opts.reduceOp, tensor.dtype)[0] != "sum":
            raise ValueError("the backend dist can add sparse tensors, and not reduce them in another way")
        own = tensor.detach().coalesce()
        entries = self._gathered(torch.tensor([own._nnz()]), [1] * self.size(), opts)
        counts = [int(count) for (count,) in entries]
        indices = self._gathered(own.indices().t().contiguous(), counts, opts)
        values = self._gathered(own.values(), counts, opts)
        summed = torch.sparse_coo_tensor(torch.cat(indices).t(), torch.cat(values), tensor.shape, check_invariants=False)
        with torch.no_grad():
            tensor.copy_(summed.coalesce())
        return self._work(None, [tensor])

    def _gathered(self, own, counts, opts):
        """Returns the rows of all ranks, of which each has as many as `counts` says."""
        outputs = [own.new_empty((count, *own.shape[1:])) for count in counts]
        gather = c10d.AllgatherOptions()
        gather.timeout, gather.asyncOp = opts.timeout, False
        self.allgather([outputs], [own], gather).wait()
        return outputs

    # What the operations share.

    def _common(self, opts, *targets):
        """Returns what each call of the Rust side has: timeout, whether the program goes on, and how to copy out."""
        copies = [target.copy_out for target in targets if target.copy_out is not None]
        is_async = opts.asyncOp or self._coalesced is not None or self._event is not None
        if self._event is not None:
            copies.append(self._event.call_ended)
        return self._limit(opts.timeout), is_async, _one_of(copies)

    def _limit(self, timeout):
        if timeout is None or timeout.days < 0:
            return self._timeout_ms
        return max(1, int(timeout / timedelta(milliseconds=1)))

    def _call(self, name, arguments, memory, opts, tensors, *targets):
        """Makes or starts a call on this memory. `tensors` are the result, and the targets copy it out."""
        options = self._common(opts, *targets)
        return self._work(self._group.call(name, arguments, name_of(memory), memory, options), tensors)

    def _work(self, call, tensors):
        self._sequence += 1
        work = Work([] if call is None else [call], list(tensors), self._event is not None)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _together(self, works, tensors):
        return Work([call for work in works for call in work._calls], list(tensors), self._event is not None)

    def start_coalescing(self, device=None):
        self._coalesced = []

    def end_coalescing(self, device=None):
        works, self._coalesced = self._coalesced, None
        return self._together(works, [tensor for work in works for tensor in work._tensors])

    def _rows(self, tensor, sizes):
        if sizes:
            if len(sizes) != self.size() or sum(sizes) != tensor.shape[0]:
                raise ValueError(f"the split sizes {list(sizes)} do not divide {tensor.shape[0]} rows among {self.size()} ranks")
            return sizes
        if tensor.shape[0] % self.size():
            raise ValueError(f"{tensor.shape[0]} rows cannot be divided evenly among {self.size()} ranks: give split sizes")
        return [tensor.shape[0] // self.size()] * self.size()

    def _check_count(self, tensors, what):
        if len(tensors) != self.size():
            raise ValueError(f"{len(tensors)} {what} were given for {self.size()} ranks: give one for each rank")

    def set_timeout(self, timeout):
        """Sets the timeout of calls that have none of their own."""
        self._timeout_ms = max(1, int(timeout / timedelta(milliseconds=1)))

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self):
        return self._sequence

    getSequenceNumberForGroup = _get_sequence_number_for_group

    def _set_sequence_number_for_group(self):
        pass

    def getBackendName(self):
        return "dist"

    name = _get_backend_name = getBackendName


class Backend(_Operations, c10d.Backend):
    """The same group, for code of PyTorch that asks a process group for its backend."""

    def __init__(self, group, rank, size):
        super().__init__(rank, size)
        self._group, self._timeout_ms = group._group, group._timeout_ms
        self._coalesced, self._event, self._sequence = None, None, 0
        self._process_group = weakref.ref(group)

    # The base class would ask this class for what this class does not say.
    supports_splitting = True
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    _supports_time_estimate = False

    @property
    def options(self):
        return c10d.Backend.Options("dist", timedelta(milliseconds=self._timeout_ms))

    def shutdown(self):
        group = self._process_group()
        if group is not None:
            group.shutdown()


class ProcessGroup(_Operations, c10d.ProcessGroup):
    """A process group whose ranks communicate over dist."""

    def __init__(self, store, rank, size, timeout, name, ranks):
        super().__init__(store, rank, size)
        self._timeout_ms = max(1, int(timeout / timedelta(milliseconds=1)))
        self._coalesced, self._event, self._sequence = None, None, 0
        self._name, self._ranks = name, ranks
        self._group, host = rendezvous.join(store, rank, size, self._timeout_ms, name)
        # A process that ends without leaving counts as dead. The finaliser also runs in children of multiprocessing,
        # at their end, and not in children of this process.
        self._leave = Finalize(self, _leave, (self._group, host), exitpriority=10)
        kind = c10d.ProcessGroup.BackendType.CUSTOM
        self._register_backend(torch.device("cpu"), kind, Backend(self, rank, size))
        self._set_default_backend(kind)

    @classmethod
    def create(cls, options, backend_options=None):
        """Joins the group that torch.distributed describes."""
        ranks = options.global_ranks_in_group or list(range(options.group_size))
        timeout = options.timeout
        return cls(options.store, options.group_rank, options.group_size, timeout, str(options.group_id), ranks)

    def split_group(self, new_ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None):
        """Returns the group of these ranks, or None on ranks that are not in it."""
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self._name}:{'-'.join(map(str, new_ranks))}"
        store = c10d.PrefixStore(f"{name}/", self.get_group_store())
        timeout = timeout or timedelta(milliseconds=self._timeout_ms)
        ranks = [self._ranks[rank] for rank in new_ranks]
        group = type(self)(store, new_ranks.index(self.rank()), len(new_ranks), timeout, name, ranks)
        group._set_group_name(name)
        group._set_group_desc(group_desc or "undefined")
        return group

    def shutdown(self):
        """Leaves the group. Rank 0 hosts the group's coordinator and waits until all other ranks have left."""
        self._leave()

    def abort(self):
        """Ends the job of the group for every rank."""
        self._group.abort("it called abort")


def _leave(group, host):
    group.close()
    if host is not None:
        host.close()


# The options of messages, which PyTorch passes none for.
_MESSAGE = c10d.BarrierOptions()


def _options(kind, timeout, **values):
    options = kind()
    if timeout is not None:
        options.timeout = timeout
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _listed(tensors):
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    if len(tensors) != 1:
        raise ValueError(f"the backend dist works on one tensor per rank, and {len(tensors)} were given")
    return tensors


def _one_of(copies):
    if len(copies) < 2:
        return copies[0] if copies else None
    return lambda: [copy() for copy in copies]


def _check_type(tensors):
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype:
            raise ValueError(f"tensors of one call have one type, and these have {dtype} and {tensor.dtype}")


def _reduction(op, dtype):
    """Returns the name of a reduction on elements of this type, and its factor."""
    kind = op.op if isinstance(op, c10d.ReduceOp) else op
    name = _OPS.get(kind)
    if name is None or not is_reducible(dtype):
        raise ValueError(f"the backend dist cannot reduce {dtype} with {kind}")
    factor = 1.0
    if name == "pre_mul_sum":
        factor = float(op.factor)
    if dtype is torch.bool:
        name = _OPS_OF_BOOL.get(name)
    if dtype.is_complex and name not in _OPS_OF_COMPLEX:
        name = None
    if name is None:
        raise ValueError(f"the backend dist cannot reduce {dtype} with {kind}")
    return name, factor
