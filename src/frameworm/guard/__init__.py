"""Regression guard: decides whether one run is slower, or learns less, than another.

In: two or more stored runs, or pairs of measured windows from the tuner. Out: a comparison with confidence intervals
(`comparison`), a verdict against a limit (`regression`), a proof that a change is faster and leaves the numbers
intact (`proof`). Pure functions over records; no torch.
"""
