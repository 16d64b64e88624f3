import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from wellcond.report.pictures import Picture, picture_grid


def image_of(picture):
    data = re.search(r'src="data:image/\w+;base64,([^"]+)"', picture.__html__())[1]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_a_matrix_is_kept_exactly():
    matrix = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)
    assert (image_of(Picture(matrix, "m", name="m", exact=True)) == matrix).all()
    assert (image_of(Picture(matrix / 255, "m", name="m", exact=True)) == matrix).all()


def test_a_photograph_is_kept_nearly():
    x, y = np.meshgrid(np.linspace(0, 1, 64), np.linspace(0, 1, 48))
    photo = np.stack([x, y, x * y], -1)
    assert np.abs(image_of(Picture(photo, "p", name="p")) / 255 - photo).max() < 0.03


def test_noise_can_be_written():
    image_of(Picture(np.random.default_rng(0).random((224, 224, 3)), "p", name="p"))


def test_labels_are_escaped_and_describe():
    html = Picture(np.zeros((2, 2)), "<b> & “x”", name="n").__html__()
    assert "<b>" not in html
    assert 'alt="&lt;b&gt; &amp; “x”"' in html
    assert 'download="n.jpg"' in html
    assert 'alt="a cat"' in Picture(np.zeros((2, 2)), "label", name="n", alt="a cat").__html__()


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.full((2, 2), np.nan), "outside 0…1, or NaN"),
        (np.full((2, 2), 1.5), "outside 0…1"),
        (np.zeros((2, 2), dtype=int), "expected floats from 0 to 1, or uint8"),
        (np.zeros((3, 2, 2)), "expected \\(height, width, 3\\)"),
        (np.zeros((0, 2)), "expected"),
    ],
)
def test_mistakes_are_named(pixels, message):
    with pytest.raises(ValueError, match=f"'n'.*{message}"):
        Picture(pixels, "label", name="n").__html__()


def test_a_grid_needs_pictures_and_columns():
    picture = Picture(np.zeros((2, 2)), "label", name="n")
    assert picture_grid([picture], title="T", columns=2).count("<img") == 1
    with pytest.raises(ValueError, match="no pictures"):
        picture_grid([], title="T", columns=2)
    for columns in (0, (), (1, 0)):
        with pytest.raises(ValueError, match="cannot have columns"):
            picture_grid([picture], title="T", columns=columns)
