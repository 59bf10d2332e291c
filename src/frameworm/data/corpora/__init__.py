"""Texts on disk as tokens: readers of data sets, tokenizers, and the token cache.

In: a data set's name and folder, a tokenizer. Out: data sets over memory-mapped tokens (`text`, `token_sets`). Texts
are read and tokenised once; later runs find the result in the cache.
"""
