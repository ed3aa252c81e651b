"""Ranks: their collectives, that they agree, that one who fails is named, and what they compute."""
