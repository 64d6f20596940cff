"""How a connection ends, apart from what the system itself reports."""


class StreamEndError(ConnectionError):
    """The other end has closed the connection, and all that it sent has been read."""


class SilentError(ConnectionError):
    """The other end has shown no sign of life for too long, though it is connected."""


class AlteredError(ConnectionError):
    """What has arrived on a connection is not what the other end has sent."""
