"""Results are typed records: each is defined once, and written, read back, and shown from that definition.

In JSON a number that is not finite is null.
"""

from typing import Annotated

import msgspec

LARGEST = 2**53  # of whole numbers: so far JSON's readers agree
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Amount = Annotated[float, msgspec.Meta(ge=0)]  # finite, such as a time


class Record(msgspec.Struct):
    """Where it is read, unknown fields are passed over: of files that are newer. Raises msgspec.ValidationError for a
    field that is missing or of another type.
    """
