"""Data: images from folders and archives, and what is embedded for those who have none at hand."""

from wellcond.data.images import ImageSample, read_images, sample_images

__all__ = ["ImageSample", "read_images", "sample_images"]
