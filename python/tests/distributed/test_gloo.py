"""Process groups of gloo have one thread each, in ranks of tests and in programs that ask for it."""

from __future__ import annotations

from typing import Any

import ranks
import torch
from torch import distributed

from float8.torch.ranks import gloo


def _threads(group: Any) -> int:
    return int(group._get_backend(torch.device("cpu")).options._threads)


def _rank(mesh: Any, rank: int, world: int) -> list[int]:
    kind = distributed.distributed_c10d.ProcessGroupGloo
    gloo.use_one_thread()
    assert distributed.distributed_c10d.ProcessGroupGloo is kind  # it has one already
    groups = [distributed.group.WORLD, distributed.new_group(), mesh.get_group()]
    ops = torch.ops._c10d_functional
    own = [torch.full((16,), float(rank + i)) for i in range(4)]
    started = [ops.all_reduce(each, "sum", groups[1].group_name) for each in own]
    started += [ops.all_gather_into_tensor(each, world, groups[1].group_name) for each in own]
    results = [ops.wait_tensor(each) for each in started]
    for i in range(4):
        assert torch.equal(results[i], torch.full((16,), 2.0 * i + 1))
        assert torch.equal(results[4 + i][::16], torch.tensor([i, i + 1.0]))
    return [_threads(group) for group in groups]


def test_groups_have_one_thread(tmp_path: Any) -> None:
    assert ranks.spawn(_rank, 2, tmp_path) == [[1, 1, 1]] * 2
