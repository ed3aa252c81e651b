"""What PyTorch's pipelines compute ahead of a step is no part of it.

torch.distributed.pipelining runs each stage, forward and backward, before the first step and whenever training follows
an evaluation, to see the shapes of what stages send. A stage's x has any values then, that of uninitialised memory, and
delayed scaling would record their amaxes.
"""

from __future__ import annotations

import functools
import sys
from typing import Any


def _forget_inferred(clean: Any, states_of: Any) -> Any:
    @functools.wraps(clean)
    def clean_and_forget(stage: Any) -> Any:
        for state in states_of(stage.submod):
            state.discard_step()
        return clean(stage)

    return clean_and_forget


def watch(states_of: Any) -> bool:
    """Lets pipelines forget what they compute ahead; tells whether they do. Nothing is loaded for it, as they take a second.

    states_of: returns the scale states of a module's layers.
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    stage: Any = getattr(module, "PipelineStage", None)
    clean = getattr(stage, "_post_metadata_inference_cleanup", None)
    if clean is None:  # PyTorch before 2.13 computes without gradients
        return False
    if not hasattr(clean, "__wrapped__"):
        stage._post_metadata_inference_cleanup = _forget_inferred(clean, states_of)
    return True
