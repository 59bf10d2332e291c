"""Measure candidates with live processes that take turns, window by window.

In: two configs. Out: outcomes with windows of steps, losses and hashes of the samples seen (`outcomes`). `runner` is
the interface for a search, `live` one set of processes, `live_rank` what runs inside each of them.
"""
