"""Samples of the machine while a training runs.

In: /proc, cgroups, NVML. Out: `system-rank{r}.jsonl` and the system section of the summary. A thread reads the sources
at intervals and never makes the training wait.
"""
