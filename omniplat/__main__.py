"""`python -m omniplat`."""

from __future__ import annotations

from omniplat.cli.app import main

if __name__ == "__main__":
    main()
