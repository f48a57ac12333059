"""The mark of what Spark is to do, as the driver's own way of applying an epoch does not."""


class Unsuited(Exception):
    """Spark's way takes over; the text says why, in a few words and without values."""
