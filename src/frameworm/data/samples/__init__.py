"""Which samples each process reads, in which order, and with which random numbers.

In: a data set, a seed, an epoch, and this process's rank and worker number. Out: the indices of each step (`sampling`),
parts of a stream (`streams`), seeded workers (`workers`), and a log of samples that could not be read (`skipping`).
"""
