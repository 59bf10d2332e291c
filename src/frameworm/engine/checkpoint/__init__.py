"""Saving and resuming a training.

In: the state of a training (`training_state`, `progress`). Out: a checkpoint that is durable or absent: `snapshot`
and `staging` copy the state aside, `writer_client` and `writer_process` write it beside the training, `commit` makes
it the newest. `load` reads the newest whole one; `store` is what the session talks to.
"""
