"""The exceptions that the emulator raises."""


class MetalError(Exception):
    """The base class of the emulator's exceptions. A crash, a timeout or a stack overflow raises MetalError itself."""


class CompileError(MetalError):
    """Clang does not accept the source."""


class AddressSpaceError(MetalError):
    """A pointer leads to another address space than it is declared for, or is declared without an address space."""


class BindingError(MetalError):
    """The buffers or function constants of a launch are not those that the source declares."""


class LimitError(MetalError):
    """The number of threads, or the size of a buffer or of threadgroup memory, is not allowed."""


class OutOfBoundsError(MetalError):
    """An access outside a buffer or threadgroup array, or a write to a constant buffer."""


class UninitialisedError(MetalError):
    """Threadgroup memory, or a buffer given as `Undefined`, is read before it is written."""


class RaceError(MetalError):
    """Two threads access the same bytes, one of them writes, and no barrier is in between."""


class DivergenceError(MetalError):
    """The threads of a threadgroup do not meet at one barrier, or the lanes of a SIMD group at one operation."""


BY_NAME = {error.__name__: error for error in (MetalError, *MetalError.__subclasses__())}
