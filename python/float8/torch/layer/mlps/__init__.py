"""Fused MLPs: which modules are some, by their code, and what they compute."""
