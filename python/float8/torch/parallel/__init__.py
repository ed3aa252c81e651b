"""Tensor parallelism: a linear over ranks that each have a part of its operands."""
