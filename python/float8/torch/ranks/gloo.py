"""Process groups of gloo, each of which has one thread.

PyTorch gives each two threads, and both write the name of the collective that they ended into one string
without a lock (ProcessGroupGloo::runLoop, seen in PyTorch 2.13). Where two end at the same time, memory is freed
twice, and a rank dies in `malloc` some time later, or hangs. NCCL's process groups have no such threads.
"""

from __future__ import annotations

import datetime
from typing import Any

from torch import distributed


def use_one_thread() -> None:
    """Gives one thread to each process group of gloo that this process makes from now on.

    Collectives keep their order and their bits; of one process group, none overlaps with another.
    """
    pytorch: Any = distributed.distributed_c10d
    if getattr(pytorch.ProcessGroupGloo, "has_one_thread", False):
        return

    class ProcessGroupGloo(pytorch.ProcessGroupGloo):  # type: ignore[misc]
        has_one_thread = True

        def __init__(
            self, store: Any, rank: int, size: int, timeout: datetime.timedelta, **fields: Any
        ) -> None:
            options = self._Options()
            options._devices = [self.create_default_device()]
            options._threads = 1
            options._timeout = timeout
            for name, value in fields.items():  # enable_reconfigure, from PyTorch 2.14 on
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    pytorch.ProcessGroupGloo = ProcessGroupGloo
