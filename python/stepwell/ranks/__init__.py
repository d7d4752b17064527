"""Ranks that agree on a step, and gather each other's weights."""
