"""Which samples each process reads, in which order, and with which random numbers.

In: a data set, a seed, an epoch and this process's place among ranks and workers. Out: indices of each step
(`sampling`), shares of a stream (`streams`), seeded workers (`workers`), and a log of samples that could not be read
(`skipping`).
"""
