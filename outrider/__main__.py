"""`python -m outrider`."""

from __future__ import annotations

from outrider.cli.app import main

if __name__ == "__main__":
    main()
