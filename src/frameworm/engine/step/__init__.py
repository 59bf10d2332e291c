"""The training step: forward, loss, backward, update, optionally replayed as a CUDA graph.

In: a `StepBatch`. Out: a `StepResult` whose tensors stay on the device. `step` is the only place where a model learns;
`capture` records it as one graph per batch shape and `capture_check` compares both from the same state; `evaluation`
scores a model.
"""
