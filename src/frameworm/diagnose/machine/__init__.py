"""Whether a machine is fit to train on.

In: the facts of `hardware.inspect`, environment variables and the intended job. Out: checks (`judge`), each with what
was found, whether it is right, what to do and why. What could not be determined is `unknown`, never ok.
"""
