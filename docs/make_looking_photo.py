"""Draws docs/images/looking-photo.png: the shipped agent looks at a photograph that comes with scikit-learn.

python docs/make_looking_photo.py
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_sample_image

from stam import cli

OUT = Path(__file__).parent / "images" / "looking-photo.png"
PAPER, INK, SOFT = (247, 245, 240), (29, 28, 36), (93, 90, 104)
TILE, GAP, TOP = 168, 14, 34  # the layout of a strip


def main() -> None:
    """Draws the strip of glimpses and adds the whole photograph on its left."""
    photo = OUT.with_name("china.png")
    image = Image.fromarray(np.asarray(load_sample_image("china.jpg")))
    image.save(photo)
    try:
        cli.main(["predict", "imagenette-tiny", str(photo), "--first-location", "2,5", "--strip", str(OUT)])
    finally:
        photo.unlink()
    strip = Image.open(OUT).convert("RGB")
    picture = Image.new("RGB", (strip.width + TILE + GAP, strip.height), PAPER)
    picture.paste(strip, (TILE + GAP, 0))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, 2 * TILE + GAP, TOP - 2), fill=PAPER)  # the file's name
    picture.paste(image.resize((TILE, TILE), Image.Resampling.LANCZOS), (GAP, TOP))
    for y, words, colour in ((10, "the scene", INK), (TOP + TILE + 9, "never seen whole", SOFT)):
        draw.text((GAP, y), words, fill=colour, font=ImageFont.load_default(size=16))
    picture.quantize(256, dither=Image.Dither.NONE).save(OUT, optimize=True)


if __name__ == "__main__":
    main()
