"""Gradients in fewer bytes: codecs, DDP hooks around them, and the choice between them.

In: gradient buckets of DDP. Out: the same buckets, averaged over the ranks, with fewer bytes sent. A codec (`codecs`,
`quantize`, `sparse`) knows tensors only; `registry` makes one by its name; `hook` and `exchange` decide what is sent
to whom; `residuals` keeps what was lost for the next step; `public` has the names users import.
"""
