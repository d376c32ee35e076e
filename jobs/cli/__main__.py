"""`python -m tidegate.jobs.cli` is `tidegate`, for those who know the interpreter but not the PATH."""

from tidegate.jobs.cli.main import main

main()
