"""Which lag a source needs: pure computation over the lateness sketches in the manifests."""
