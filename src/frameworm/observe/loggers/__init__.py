"""Experiment trackers behind one small protocol.

In: a run's config, step records, epoch records and its final record, on rank 0. Out: TensorBoard, W&B, MLflow, trackio
or a CSV file. `protocol` is what a logger must offer, `named` makes those that a config names, `points` turns records
into values, and `run_loggers` calls each logger from a thread of its own, so that one that fails or hangs costs a line.
"""
