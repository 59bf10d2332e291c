"""One model on many devices.

In: a model, an optimizer and a strategy's name. Out: a `Strategy` that places the model, synchronises gradients and
gathers state: `replicated` (DDP, DataParallel), `sharded` (ZeRO 1 to 3), `averaging`. `compression/` makes gradients
smaller on the wire, `network/` measures collectives.
"""
