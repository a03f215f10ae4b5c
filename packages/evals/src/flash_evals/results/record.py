"""The base class of all records. A record's definition also says how it is written to JSON and read back.

In JSON a number that is not finite is null.
"""

from typing import Annotated

import msgspec

LARGEST = 2**53  # JSON readers represent whole numbers exactly up to this
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Amount = Annotated[float, msgspec.Meta(ge=0)]  # finite, such as a time


class Record(msgspec.Struct):
    """A record of a result file.

    Reading a record ignores unknown fields, which newer versions may have written, and raises msgspec.ValidationError
    for a field that is missing or of another type.
    """
