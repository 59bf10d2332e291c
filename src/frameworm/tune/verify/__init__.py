"""Verify that captured steps on several GPUs work on this machine, by trainings of a minute or less.

In: the number of GPUs and a budget. Out: a folder with the predictions (written before anything ran on more than one
GPU), the run folders, `verify.json` and a page. `trainings` says what is trained, `processes` runs it with a deadline,
`equality` compares what two of them came to, and `verify` runs the checks in order of importance while there is time.
"""
