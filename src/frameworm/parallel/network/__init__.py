"""What the network between the ranks can do.

In: a process group; all ranks call the probe at the same time. Out: a `scaling.network.NetworkModel` with latency and
bandwidth of each collective, which `network.json`, predictions and the choice of a compression method rest on.
"""
