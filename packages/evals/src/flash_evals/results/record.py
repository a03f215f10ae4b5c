"""The base of all records: each is defined once, and written, read back and shown from that definition.

In JSON a number that is not finite is null.
"""

from typing import Annotated

import msgspec

LARGEST = 2**53  # JSON readers represent whole numbers exactly up to this
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Amount = Annotated[float, msgspec.Meta(ge=0)]  # finite, such as a time


class Record(msgspec.Struct):
    """Reading one ignores unknown fields, which newer versions may have written. Raises msgspec.ValidationError for a
    field that is missing or of another type.
    """
