"""The checks, one module per group. Collected by pytest only where `--omniplat-backend` names a backend."""
