"""Checks a file's ad-hoc code signature, which has a hash of every page. macOS on arm64 loads only signed files.

Apple's cs_blobs.h defines the layout. All numbers are big-endian.
"""

import hashlib
import struct

EMBEDDED_SIGNATURE = 0xFADE0CC0
CODE_DIRECTORY = 0xFADE0C02
ADHOC = 0x2


class SignatureError(Exception):
    """The signature is not valid, so macOS refuses the file."""


def blobs(signature: bytes) -> dict[int, bytes]:
    """Returns the parts of a signature by their magic numbers."""
    magic, _, count = struct.unpack_from(">III", signature)
    if magic != EMBEDDED_SIGNATURE:
        raise SignatureError("is not a signature")
    found = {}
    for i in range(count):
        _, offset = struct.unpack_from(">II", signature, 12 + 8 * i)
        kind, length = struct.unpack_from(">II", signature, offset)
        found[kind] = signature[offset : offset + length]
    return found


def verify(file: bytes, offset: int, size: int) -> int:
    """Checks the signature at `offset` of `file`. Returns the number of pages that it covers."""
    directory = blobs(file[offset : offset + size]).get(CODE_DIRECTORY)
    if directory is None:
        raise SignatureError("has no code directory")
    _, flags, hashes, _, _, pages, signed_size = struct.unpack_from(">7I", directory, 8)
    hash_size, _, _, page_bits = struct.unpack_from(">4B", directory, 36)
    if not flags & ADHOC:
        raise SignatureError("is not ad hoc")
    if signed_size != offset:
        raise SignatureError(f"covers {signed_size} bytes, the file has {offset} before it")
    page = 1 << page_bits
    if pages != -(-signed_size // page):
        raise SignatureError(f"has {pages} hashes for {signed_size} bytes")
    wrong = []
    for i in range(pages):
        content = file[i * page : min((i + 1) * page, signed_size)]
        if hashlib.sha256(content).digest()[:hash_size] != directory[hashes + i * hash_size :][:hash_size]:
            wrong.append(i)
    if wrong:
        raise SignatureError(f"has wrong hashes for page {', '.join(map(str, wrong))} of {pages}")
    return int(pages)
