"""What happens when a step goes wrong.

In: a loss that is not finite, a spike, an error for want of memory, a rank that hangs. Out: the step skipped, done
again in pieces, or rolled back, or an error that names the rank, the step, the cause and what to do.
"""
