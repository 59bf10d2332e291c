"""`python -m frameworm` is the command line."""

from __future__ import annotations

if __name__ == "__main__":
    import os
    import sys

    # Python puts the working directory (`-m`) or this file's own directory first on the path, so a typer.py there would
    # be imported. A console script has its own directory there. pathlib is avoided: it could be shadowed the same way.
    if not getattr(sys.flags, "safe_path", False) and sys.path[0] in (os.getcwd(), os.path.dirname(__file__)):  # noqa: PTH109, PTH120
        sys.path[0] = os.path.dirname(sys.executable)  # noqa: PTH120
    from frameworm.cli.main import main

    main()
