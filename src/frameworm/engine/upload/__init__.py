"""Copies of runs in object storage: uploaded during training, and fetched to resume or evaluate a run.

In: a local run folder with its checkpoints, and a URL. Out: objects, and one line in the log when storage is lost or
back. A checkpoint counts once its manifest is there, which is uploaded last.
"""
