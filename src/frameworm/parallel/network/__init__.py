"""Measure the network between the ranks.

In: a process group; all ranks call the probe at the same time. Out: a `scaling.network.NetworkModel` with latency and
bandwidth of each collective, used by `network.json`, predictions and the choice of a compression method.
"""
