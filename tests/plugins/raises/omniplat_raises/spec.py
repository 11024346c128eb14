"""A backend that fails while it is imported."""

raise RuntimeError("driver and runtime disagree")
