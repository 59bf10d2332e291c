"""Prepare a model for training: precision, activation checkpointing, compilation, processors.

In: a model and its settings. Out: the same model, changed in place or wrapped so that it computes the same faster or in
less memory.
"""
