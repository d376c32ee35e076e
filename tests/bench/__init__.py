"""Measurements and proofs on real or generated data, each a program with a `make` target.

`make test` only tests the programs.
"""
