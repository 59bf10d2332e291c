"""Names of torch's private modules, for code that asks whether one is loaded without loading it; imports no torch."""

from __future__ import annotations

# The compiler. If torch renames it, frameworm loads it where it need not, which takes a second.
COMPILER = "torch._dynamo"
# What the compiler keeps its statistics in; without it a profile has no time of compilation.
COMPILER_STATISTICS = "torch._dynamo.utils"
# Where compiling for a GPU begins; loaded ahead for trials.
GPU_COMPILER = "torch._inductor.compile_fx"
# The logger that reports what the compiler could not compile; without it the report stays torch's own, at length.
COMPILER_FAILURES = "torch._dynamo.convert_frame"
# Where DTensors wait for other ranks; without it a profile of a script counts that wait as compute.
FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"
# How pickles of torch's checkpoints name a tensor; a checkpoint that names it otherwise is refused as unreadable.
PICKLED_TENSORS = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")  # the second of newer types
