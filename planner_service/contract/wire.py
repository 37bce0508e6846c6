"""What all documents of the wire share."""

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """A document of the wire: unknown keys, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)
