"""Benchmarks of one op, tuning of its launch parameters, and tests of which backends run on this machine."""
