"""``make rows-on-spark``: what shows that the driver touches no row."""
