"""Which change to try next, and whether to keep it.

In: knobs, the context and a trial runner. Out: a `TuneResult`. `order` ranks candidates, `challenge` takes one
through trial and proof, `ledger` keeps the account of time, `journal` lets an interrupted search go on.
"""
