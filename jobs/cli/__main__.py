"""Runs the command line as `python -m tidegate.jobs.cli`, for environments without a PATH."""

from .main import main

if __name__ == "__main__":
    main()
