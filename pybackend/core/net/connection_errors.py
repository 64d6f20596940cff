"""Connection errors, in addition to those of the system."""


class StreamEndError(ConnectionError):
    """The other end has closed the connection, and all of its data has been read."""


class SilentError(ConnectionError):
    """The other end has shown no sign of life for too long, though it is connected."""


class AlteredError(ConnectionError):
    """The received data is not what the other end sent."""
