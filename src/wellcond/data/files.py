"""Images that stay in their files, for sets too large to decode into memory."""

__all__ = ["ImageFiles"]


class ImageFiles:
    pass
