"""A backend that exports something else."""

SPEC = {"name": "wrong-type"}
