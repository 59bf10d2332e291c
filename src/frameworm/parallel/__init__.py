"""One model on many devices.

In: a model, an optimizer and the name of a strategy. Out: a `Strategy` that places the model, synchronises gradients
and gathers state: `replicated` (DDP, DataParallel), `sharded` (ZeRO 1 to 3), `averaging`. `compression/` reduces the
bytes that gradients take on the network, `network/` measures collectives.
"""
