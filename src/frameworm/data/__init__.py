"""Batches ready in time.

In: a config's data section or a user's loader. Out: a loader that yields batches already on the device (`loader`,
`prefetch`), and steps made of micro-batches (`steps`). `corpora/` reads texts into tokens, `samples/` decides which
samples each process reads, `batches/` puts them together. A step holds the same samples on any number of processes.
"""
