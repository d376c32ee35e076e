"""Programs of CI. `.ci/run` starts them; CONTRIBUTING.md describes what they judge."""
