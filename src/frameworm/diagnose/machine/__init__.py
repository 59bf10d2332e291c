"""Whether a machine is fit to train on.

In: the facts of `hardware.inspect`, environment variables and what is intended. Out: checks (`judge`), each with what
was found, whether that is right, what to do and why. What could not be found out is `unknown`, never ok.
"""
