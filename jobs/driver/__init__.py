"""The driver process: holds the lease, runs epochs, publishes, says how it is, and stops when asked."""
