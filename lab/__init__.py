"""Sweeps, proofs, benchmarks and reports: see README.md."""
