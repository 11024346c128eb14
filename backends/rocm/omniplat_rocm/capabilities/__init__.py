"""What each of the backend's kernels runs, as data."""
