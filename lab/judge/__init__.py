"""Settle a claim: is one backend of an op right, and does training with it run faster than with another backend?"""
