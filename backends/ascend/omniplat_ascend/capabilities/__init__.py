"""Capabilities by the kind of number that weights are stored in."""
