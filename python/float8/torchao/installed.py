"""Importing this module calls float8.torchao.install(), for programs that import what they are told to."""

from __future__ import annotations

from float8.torchao import install

install()
