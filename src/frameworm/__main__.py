"""`python -m frameworm` is the command line."""

from __future__ import annotations

from frameworm.cli.main import main

if __name__ == "__main__":
    main()
