"""Copies of runs in object storage: made beside training, and fetched where a run goes on or is scored.

In comes a local run folder with its checkpoints, and a URL; out go objects, and one line in the log when storage is
lost or back. A checkpoint counts once its manifest is there, which is the last of its objects to be uploaded.
"""
