"""Saving and resuming a training.

In: the state of a training (`training_state`, `progress`). Out: a checkpoint that is either durable or absent:
`snapshot` and `staging` copy the state aside, `writer_client` and `writer_process` write it in the background, `commit`
makes it the newest. `load` reads the newest complete one; `store` is the session's interface.
"""
