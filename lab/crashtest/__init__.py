"""Disturb training runs at random, and judge whether they went on as if nothing had happened: scripts/crashtest.py.

faults.py has the kinds of faults. inject.py lets an operation on a file fail, with faults.c. damage.py changes files.
tracker.py disturbs trackers, and judge.py decides whether a run was lost.
"""
