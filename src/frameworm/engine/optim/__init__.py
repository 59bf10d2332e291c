"""From gradients to new weights: unscale, clip, optimizer, schedule.

In: gradients and a learning-rate schedule. Out: changed parameters, the gradient norm, and whether the step was
skipped (`update`). `adamw_kernel`, `host_adamw` and `half_weights` do what torch's AdamW does with fewer passes over
memory; `muon` adds torch's Muon; `ema` and `schedule_free` provide the averaged weights used for validation.
"""
