"""Jobs: PySpark streaming scripts of other people, supervised and sealed batch by batch."""
