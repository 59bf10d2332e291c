"""Experiments with the engine, each in its own process.

In: a config and a time budget (`tuner`). Out: `best.yaml`, `tune.json` and a page, with a proof for every accepted
change. `knobs/` says what may change, `search/` decides what to try, `trials/` measures, `processes/` starts and ends
processes; `batch_size/`, `analyzer/` and `sweep/` are the other experiments.
"""
