"""Backends with one fault each, which the conformance suite has to find, and one without."""
