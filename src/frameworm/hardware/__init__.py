"""What this machine has and can do: devices, cores, memory, storage, drivers.

In: what the operating system, torch and NVML report. Out: typed facts (`inspect`), a fingerprint for run summaries
(`fingerprint`), a table of device peaks (`devices`), in which an unknown device is unknown and never a guess, and a
config with every `auto` decided for this machine (`resolve`).
"""
