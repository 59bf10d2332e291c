"""What happens when a step goes wrong.

In: a non-finite loss, a spike, an out-of-memory error, a rank that hangs. Out: the step skipped, repeated in pieces, or
rolled back, or an error that names the rank, the step, the cause and what to do.
"""
