"""Ranks: their collectives, that they agree, and that one who fails is named."""
