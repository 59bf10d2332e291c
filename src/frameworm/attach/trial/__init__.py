"""One trial of a user's own script: settings applied from outside, steps counted, timed and compared.

In: a script, its arguments, the switches to set and what to do (`job`). Out: timed windows, and what steps computed
from given states. `switches` names what can be set, `interception` sets it, `steps` counts the steps of the running
loop, `timing` and `lockstep` are the purposes of a trial, `main` is the process.
"""
