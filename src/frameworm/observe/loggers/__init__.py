"""Experiment trackers behind one small protocol.

In: a run's config, step records, epoch records and its final record, on rank 0. Out: TensorBoard, W&B, MLflow, trackio
or a CSV file. `protocol` is the interface of a logger, `named` makes those that a config names, `points` turns records
into values, and `run_loggers` calls each logger in its own thread, so that one that fails or hangs costs only a log
line.
"""
