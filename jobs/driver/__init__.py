"""The driver process: takes the lease, runs epochs, publishes, reports its status, and stops."""
