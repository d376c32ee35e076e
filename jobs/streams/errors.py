"""Error catalogue of streams, pipes and reducers."""

from tidegate.errors import PoisonError, load_catalogue


class RowsRetiredError(PoisonError):
    """Rows that an attachment needs are in no epoch and in no table any more."""


__getattr__ = load_catalogue(__name__)
