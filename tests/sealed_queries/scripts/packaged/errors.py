"""Errors of the script; tidegate's own rooms have modules of this name."""


class NoSettingsError(Exception):
    """There is no file of settings in the current folder."""
