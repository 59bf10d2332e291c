"""Launching: finding the other processes of a job, process groups, and how a job ends.

In: the environment (torchrun, SLURM, or none) and the options of a launch. Out: this process's rank (`environment`),
a process group with a timeout (`process_group`), started workers (`torchrun`, `slurm`), an agreement between ranks on
when to stop (`stopping`), and failures reported to the user once (`failures`). `environment` is the only module here
that reads environment variables.
"""
