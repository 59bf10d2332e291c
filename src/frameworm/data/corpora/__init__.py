"""Texts on disk as tokens: readers of data sets, tokenizers, and the token cache.

In: the name and folder of a data set, and a tokenizer. Out: data sets over memory-mapped tokens (`text`, `token_sets`).
Texts are read and tokenised once; later runs find the result in the cache.
"""
