"""A backend of torch.distributed for CPU tensors: ``torch.distributed.init_process_group("dist")``."""

from torch.distributed import Backend

from .process_group import ProcessGroup
from .work import Work

__all__ = ["ProcessGroup", "Work", "register"]


def register():
    """Makes the name ``dist`` known to torch.distributed, which calls this by itself for an installed package."""
    if "DIST" not in Backend._plugins:
        Backend.register_backend("dist", ProcessGroup.create, extended_api=True, devices=["cpu"])


register()
