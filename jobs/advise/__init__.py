"""Which lag a source needs.

Pure computation over the lateness sketches that stand in the manifests. No Spark, no store.
"""
