"""The optimisation checklist of a config, checked.

In: a resolved config on a machine (`subject`). Out: items that are done, open or do not apply, with reasons and the
expected gain, which is measured where `known_gains` names the results file.
"""
