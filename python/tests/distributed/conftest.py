"""Tests on ranks. What several of their rooms use lies beside this file, which makes it importable there."""
