"""From gradients to new weights: unscale, clip, optimizer, schedule.

In: gradients and a learning-rate schedule. Out: changed parameters, the gradient norm, and whether the step was
skipped (`update`). `adamw_kernel`, `host_adamw` and `half_weights` do what torch's AdamW does with fewer passes over
memory, `muon` puts torch's Muon beside it; `ema` and `schedule_free` give the averaged weights to validate with.
"""
