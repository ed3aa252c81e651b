"""Weights that FSDP shards: their copies in fp8, how these follow the weights, and their gathers."""
