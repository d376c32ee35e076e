"""Mutation testing of the trusted core: ``make mutation N=400 SEED=0``."""
