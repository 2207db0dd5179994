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
}


def name_of(dtype):
    """Returns the name of the elements as which tensors of this type are moved."""
    if dtype.is_complex:
        return _NAMES.get(dtype.to_real(), "u8")
    return _NAMES.get(dtype, "u8")


def is_reducible(dtype):
    """Returns True if elements of this type can be reduced: as themselves, as pairs of reals or as bits."""
    return dtype in _NAMES or dtype is torch.bool or (dtype.is_complex and dtype.to_real() in _NAMES)


def as_elements(tensor):
    """Returns a contiguous tensor as a view of the elements as which it is moved."""
    if tensor.dtype in _NAMES:
        return tensor
    if tensor.is_complex() and tensor.dtype.to_real() in _NAMES:
        return torch.view_as_real(tensor)
    return tensor.view(-1).view(torch.uint8)


def is_plain(tensor):
    """Returns True if the tensor's own memory can be used."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _is_usable(tensor):
    """Returns True for the usual tensor, whose memory is that of its elements. It is the fast path."""
    is_dense = tensor.is_cpu and tensor.layout is torch.strided
    return is_dense and tensor.dtype in _NAMES and tensor.is_contiguous() and not tensor.is_neg()


def check(tensor):
    """Refuses tensors that are not in memory of the CPU."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        kind = tensor.device if not tensor.is_cpu else tensor.layout
        raise ValueError(f"the backend dist works on dense tensors on the CPU, and this tensor is {kind}: move it first")


def source(tensor):
    """Returns memory with the values of the tensor, for reading."""
    if _is_usable(tensor):
        return tensor
    check(tensor)
    if is_plain(tensor):
        return as_elements(tensor.detach())
    return as_elements(tensor.detach().resolve_conj().resolve_neg().contiguous())


class Target:
    """Memory for the values that a call writes to a tensor, and perhaps reads before."""

    __slots__ = ("copy_out", "memory")

    def __init__(self, tensor, is_read=False):
        if _is_usable(tensor):
            self.memory, self.copy_out = tensor, None
            return
        check(tensor)
        tensor = tensor.detach()
        self.copy_out = None
        if is_plain(tensor):
            self.memory = as_elements(tensor)
            return
        make = torch.clone if is_read else torch.empty_like
        values = make(tensor, memory_format=torch.contiguous_format)
        if is_read:
            values = values.resolve_conj().resolve_neg()
        self.memory = as_elements(values)
        self.copy_out = lambda: tensor.copy_(values)


class Parts:
    """One tensor of memory for a list of tensors, one after the other.

    If the tensors already lie so, as those of `chunk` do, it is their own memory.
    """

    __slots__ = ("copy_out", "counts", "memory")

    def __init__(self, tensors, is_read):
        for tensor in tensors:
            check(tensor)
        tensors = [tensor.detach() for tensor in tensors]
        elements = _elements_of(tensors[0].dtype)
        self.counts = [tensor.numel() * elements for tensor in tensors]
        self.copy_out = None
        if _follow_each_other(tensors):
            self.memory = as_elements(_joined(tensors))
            return
        if is_read:
            values = torch.cat([tensor.reshape(-1) for tensor in tensors]).resolve_conj().resolve_neg()
            self.memory = as_elements(values)
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
    if dtype in _NAMES:
        return 1
    if dtype.is_complex and dtype.to_real() in _NAMES:
        return 2
    return dtype.itemsize


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
