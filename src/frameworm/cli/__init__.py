"""The command line: one module per group of verbs, and no logic of its own.

In: arguments. Out: text on the terminal, JSON with `--json`, and an exit code (0 ok, 1 the checked thing failed, 2
usage or environment error, 3 inconclusive). Each verb parses its arguments, calls one function of a lower floor and
prints what comes back. Modules import torch late, so that `--help` stays fast.
"""
