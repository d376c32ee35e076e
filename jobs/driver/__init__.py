"""The driver process.

Holds the lease, runs epochs, publishes, says how it is, and stops when asked.
"""
