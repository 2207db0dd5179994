"""The handle of a call that was started."""

from datetime import timedelta

import torch
from torch._C import _distributed_c10d as c10d


class Work(c10d.Work):
    """Calls that were started, and the tensors that they work on.

    `wait` may make a call itself, and lets other threads of Python run meanwhile. Ctrl-C ends it.
    """

    def __init__(self, calls, tensors, is_profiled=False):
        super().__init__()
        self._is_profiled = is_profiled
        self._calls = calls
        self._tensors = tensors
        self._future = None
        self.sender = None

    def wait(self, timeout=None):
        """Waits until the calls are done, or for the timeout, and raises the error of the first that has failed."""
        limit = _milliseconds(timeout)
        if limit is None and self._is_profiled:
            limit = _FOREVER_MS
        for call in self._calls:
            call.wait(limit)
        return True

    def is_completed(self):
        return all(call.is_done() for call in self._calls)

    def is_success(self):
        return self.is_completed() and self.exception() is None

    def exception(self):
        """Returns the exception of the first call that has failed, or None."""
        errors = (call.exception() for call in self._calls)
        return next((error for error in errors if error is not None), None)

    def result(self):
        return self._tensors

    def synchronize(self):
        self.wait()

    def get_future(self):
        """Returns a future of the tensors, which the thread that makes the last call completes."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._settle_after(list(self._calls))
        return self._future

    def _settle_after(self, calls):
        if calls:
            calls[0].on_done(lambda: self._settle_after(calls[1:]))
            return
        error = self.exception()
        if error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(error)

    def source_rank(self):
        """Returns the rank, in the group, whose message was received."""
        if self.sender is None and len(self._calls) == 1:
            self.sender = self._calls[0].sender()
        if self.sender is None:
            raise ValueError("a call has a source rank only if it is a receive, and once that is done")
        return self.sender

    _source_rank = source_rank


# Calls end by their own timeouts. With a limit, the thread that waits makes no call itself.
_FOREVER_MS = 1 << 40


def _milliseconds(timeout):
    if timeout is None or timeout <= timedelta(0):
        return None
    return int(timeout / timedelta(milliseconds=1))
