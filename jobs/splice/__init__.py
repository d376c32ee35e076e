"""Splice: merge late, dead and lost rows into the outputs that they missed.

A person decides on each merge, and sees its effect before (see `docs/semantics.md`,
section 6.4, and `docs/decisions/0043-merging-has-its-own-folder.md`).
"""
