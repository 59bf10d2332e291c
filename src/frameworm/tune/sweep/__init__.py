"""Runs of one config at several world sizes.

In: a config and a list of world sizes. Out: a folder per run and `scaling.json`. Each run is a separate process with a
deadline (`process`).
"""
