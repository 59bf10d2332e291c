"""Processes of trials: started, watched against a deadline, and removed with everything they started.

In: a job for each rank. Out: its result, or how it ended. `forkserver` keeps a server that has imported everything,
so that a trial starts at once.
"""
