"""`python -m frameworm` is the command line."""

from __future__ import annotations

if __name__ == "__main__":
    import os
    import sys

    # Python puts the working folder (`-m`) or this file's own first on the path: a typer.py there would be imported.
    # A console script has its own folder in that place. Not with pathlib, which could be a file there too.
    if not getattr(sys.flags, "safe_path", False) and sys.path[0] in (os.getcwd(), os.path.dirname(__file__)):  # noqa: PTH109, PTH120
        sys.path[0] = os.path.dirname(sys.executable)  # noqa: PTH120
    from frameworm.cli.main import main

    main()
