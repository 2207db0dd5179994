"""Events of calls in the profiler of PyTorch."""

import functools

import torch
from torch.autograd import _record_function_with_args_enter, _record_function_with_args_exit


class _Event:
    """An event from the start of an operation until its last call is done."""

    def __init__(self, name, tensors, calls):
        self._handle = _record_function_with_args_enter(name, *tensors)
        self._calls = calls

    def call_ended(self):
        self._calls -= 1
        if self._calls == 0:
            _record_function_with_args_exit(self._handle)


def profiled(title, inputs, calls=lambda arguments: 1):
    """Makes an operation an event, if a profiler runs. `inputs` returns the tensors whose shapes it shows.

    Profiled calls are made by a thread of the backend, so that the event is one of an asynchronous call.
    """

    def decorate(operation):
        @functools.wraps(operation)
        def run(self, *arguments, **options):
            if not torch.autograd._profiler_enabled() or self._event is not None:
                return operation(self, *arguments, **options)
            tensors = [torch.view_as_real(one) if one.is_complex() else one for one in inputs(arguments)]
            self._event = _Event(f"{self.label}:{title}", tensors, calls(arguments))
            try:
                return operation(self, *arguments, **options)
            finally:
                self._event = None

        return run

    return decorate
