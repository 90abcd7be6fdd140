"""Whole training jobs, from a command line to a model with its card and report."""
