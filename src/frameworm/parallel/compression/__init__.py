"""Gradients made smaller for the network."""
