"""docs/estimator/screenshot.png: the concurrency page as a browser shows it.

The page's text is kept in the picture, so that a test can tell when the two differ.
"""

import io
from pathlib import Path

from browser import Browser
from PIL import Image
from PIL.PngImagePlugin import PngInfo

PAGE = Path(__file__).resolve().parents[1] / "docs" / "estimator" / "index.html"
PICTURE = PAGE.with_name("screenshot.png")
ADDRESS = f"{PAGE.as_uri()}#theme=light"
COLOURS = 128  # of the palette: flat areas and edges of letters
TEXT = "document.body.innerText"


def main() -> None:
    """Write the picture."""
    with Browser() as browser:
        browser.open(ADDRESS)
        picture = Image.open(io.BytesIO(browser.picture())).convert("RGB")
        text = PngInfo()
        text.add_itxt("text", browser.evaluate(TEXT), zip=True)
    flat = picture.quantize(COLOURS, dither=Image.Dither.NONE)
    flat.save(PICTURE, optimize=True, pnginfo=text)


if __name__ == "__main__":
    main()
