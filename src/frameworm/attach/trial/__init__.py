"""One trial of a user's own script: settings applied from outside, steps counted, timed and compared.

In: a script, its arguments, the switches to set and what to do (`job`). Out: windows that were timed, and what steps
computed from given states. `switches` names what can be set, `interception` sets it, `steps` counts the steps of the
loop as it runs, `timing` and `lockstep` are what a trial can be for, `main` is the process.
"""
