"""Which change to try next, and whether to keep it.

In: knobs, the context and a trial runner. Out: a `TuneResult`. `order` ranks candidates, `challenge` takes one through
trial and proof, `ledger` accounts for time, `journal` lets an interrupted search continue.
"""
