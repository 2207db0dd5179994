"""Tensors as memory that the Rust side works on in place."""

import torch

# The names of the element types of dist.
_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.complex64: "complex_f32",
    torch.complex128: "complex_f64",
}

# Types that are reduced as wider ones. The low bits of a wide sum or product are those of the narrow one.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32}


def name_of(memory):
    """Returns the name of the elements of a call on this memory."""
    return _NAMES[memory[0].dtype] if memory else "u8"


def is_reducible(dtype):
    """Returns True if elements of this type can be reduced: as themselves, as wider ones or as bits."""
    return dtype in _NAMES or dtype in _WIDER or dtype is torch.bool


def as_elements(tensor):
    """Returns a contiguous tensor as a view of the elements as which it is moved."""
    return tensor if tensor.dtype in _NAMES else tensor.view(-1).view(torch.uint8)


def is_plain(tensor):
    """Returns True if the tensor's own memory can be used."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _is_usable(tensor):
    """Returns True for the usual tensor, whose memory is that of its elements. It is the fast path."""
    is_dense = tensor.is_cpu and tensor.layout is torch.strided
    return is_dense and tensor.dtype in _NAMES and is_plain(tensor)


def check(tensor):
    """Refuses tensors that are not in memory of the CPU."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        kind = tensor.device if not tensor.is_cpu else tensor.layout
        raise ValueError(f"the backend dist works on dense tensors on the CPU, and this tensor is {kind}: move it first")


def source(tensor, is_reduced=False):
    """Returns memory with the values of the tensor, for reading."""
    if _is_usable(tensor):
        return tensor
    check(tensor)
    tensor = tensor.detach()
    wider = _WIDER.get(tensor.dtype) if is_reduced else None
    if wider is None and is_plain(tensor):
        return as_elements(tensor)
    return as_elements(tensor.resolve_conj().resolve_neg().to(wider or tensor.dtype).contiguous())


class Target:
    """Memory for the values that a call writes to a tensor, and perhaps reads before."""

    __slots__ = ("copy_out", "memory")

    def __init__(self, tensor, is_read=False, is_reduced=False):
        if _is_usable(tensor):
            self.memory, self.copy_out = tensor, None
            return
        check(tensor)
        tensor = tensor.detach()
        wider = _WIDER.get(tensor.dtype) if is_reduced else None
        if wider is None and is_plain(tensor):
            self.memory, self.copy_out = as_elements(tensor), None
            return
        values = torch.empty(tensor.shape, dtype=wider or tensor.dtype)
        if is_read:
            values.copy_(tensor)
        self.memory, self.copy_out = as_elements(values), lambda: tensor.copy_(values)


class Parts:
    """One tensor of memory for a list of tensors, one after the other.

    If the tensors already lie so, as those of `chunk` do, it is their own memory.
    """

    __slots__ = ("copy_out", "counts", "memory")

    def __init__(self, tensors, is_read, is_reduced=False):
        for tensor in tensors:
            check(tensor)
        tensors = [tensor.detach() for tensor in tensors]
        wider = _WIDER.get(tensors[0].dtype) if is_reduced else None
        elements = _elements_of(wider or tensors[0].dtype)
        self.counts = [tensor.numel() * elements for tensor in tensors]
        self.copy_out = None
        if wider is None and _follow_each_other(tensors):
            self.memory = as_elements(_joined(tensors))
            return
        if is_read:
            values = torch.cat([tensor.reshape(-1) for tensor in tensors]).resolve_conj().resolve_neg()
            self.memory = as_elements(values.to(wider or values.dtype))
            return
        values = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)
        self.memory = as_elements(values)
        self.copy_out = lambda: _split(values, tensors)

    @property
    def is_even(self):
        return all(count == self.counts[0] for count in self.counts)


def counts_of_rows(rows, tensor):
    """Returns the numbers of elements of these numbers of rows of a tensor."""
    row = tensor[0].numel() if tensor.dim() and tensor.shape[0] else 1
    return [count * row * _elements_of(tensor.dtype) for count in rows]


def _elements_of(dtype):
    """Returns how many elements of dist one element of a tensor is."""
    return 1 if dtype in _NAMES else dtype.itemsize


def _follow_each_other(tensors):
    address = tensors[0].data_ptr()
    for tensor in tensors:
        if not is_plain(tensor) or tensor.data_ptr() != address or tensor.numel() == 0:
            return False
        address += tensor.nbytes
    storage = tensors[0].untyped_storage().data_ptr()
    return all(tensor.untyped_storage().data_ptr() == storage for tensor in tensors)


def _joined(tensors):
    """Returns tensors that follow each other in one storage as one tensor."""
    first = tensors[0]
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,), first.storage_offset())


def _split(values, tensors):
    parts = values.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts):
        tensor.copy_(part.view(tensor.shape))
