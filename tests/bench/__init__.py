"""Measurements and proofs on real or generated data, each a program with a `make` target; none is part of `make test`."""
