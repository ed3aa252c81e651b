"""Checks of a training on several ranks: what they compute, and whether one stands still."""
