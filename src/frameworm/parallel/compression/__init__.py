"""Gradients in fewer bytes: codecs, DDP hooks around them, and the choice between them.

In: gradient buckets of DDP. Out: the same buckets, averaged over the ranks, with fewer bytes sent. A codec (`codecs`,
`quantize`, `sparse`) only sees tensors; `registry` makes codecs by name; `hook` and `exchange` decide what is sent to
which rank; `residuals` keeps the compression error for the next step; `public` has the names users import.
"""
