"""Adapters for programs that do not build their layers from nn.Linear, or wrap it.

float8.adapters.torchtitan    overrides of torchtitan's Linear.Config and GroupedExperts.Config
float8.adapters.transformers  an implementation of the experts of transformers
float8.adapters.modules       modules with a weight and a forward of their own, as in Fast-LLM

Programs that use torchao's names, such as accelerate, need `float8.torchao.install()` alone.
"""
