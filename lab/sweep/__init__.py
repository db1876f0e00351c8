"""Sweeps: jobs in processes of their own, their order, and the comparison of their speeds with an interval."""
