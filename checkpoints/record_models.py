"""The bases of the models of records.

They are apart from the JSON itself, because commands read JSON without waiting for pydantic.
"""

from pydantic import BaseModel, ConfigDict

from .canonical_json import canonical_bytes


class FrozenModel(BaseModel):
    """Base of what never changes. Unknown fields are ignored, as a newer version may write them."""

    model_config = ConfigDict(frozen=True)


class BucketRecord(FrozenModel):
    """Base of what lies in the bucket.

    Unknown fields are refused, because dropping them would lose what a newer writer meant.
    """

    model_config = ConfigDict(extra="forbid")

    def to_bytes(self) -> bytes:
        """Return the canonical bytes, which are what the bucket stores."""
        return canonical_bytes(self.model_dump(mode="json"))
