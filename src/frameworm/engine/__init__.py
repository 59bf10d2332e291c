"""The only training loop.

In: a config and a workload (`run`), or a model, an optimizer and loaders (`trainer`). Out: a trained model, a
`RunRecord` and a run folder. `trainer` builds a `job`, `session` puts the parts together, `loop` runs the steps. The
parts live in rooms: `step/` the step itself, `optim/` its update, `model/` what is done to a model before it trains,
`checkpoint/` saving and resuming, `memory/` planning and watching memory, `faults/` what happens when a step fails.
"""
