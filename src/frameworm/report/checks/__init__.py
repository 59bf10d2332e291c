"""Reports of checks: `doctor`, `guard` and `compare`, `memory` and `network`.

In: the typed result of a check. Out: text for the terminal. One module per verb; `--json` prints the same results
without these modules.
"""
