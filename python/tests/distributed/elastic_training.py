"""A training for torchrun whose rank 1 dies in its first start: elastic_training.py FOLDER."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys

import test_rank_faults
import torch
from torch import distributed

from float8.torch.ranks import gloo

if __name__ == "__main__":
    torch.set_num_threads(1)
    gloo.use_one_thread()
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    rank = distributed.get_rank()
    mesh = distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
    losses = test_rank_faults.train(mesh, rank, sys.argv[1], "rowwise", "die once")
    pathlib.Path(sys.argv[1], f"losses{rank}").write_text(json.dumps(losses))
    distributed.barrier()
    distributed.destroy_process_group()
    # A thread of the gloo backend that still runs aborts a process that tears itself down.
    os._exit(0)
