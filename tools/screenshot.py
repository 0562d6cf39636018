"""docs/estimator/screenshot.png: the concurrency page as a browser shows it."""

import io
from pathlib import Path

from browser import Browser
from PIL import Image

PAGE = Path(__file__).resolve().parents[1] / "docs" / "estimator" / "index.html"
COLOURS = 128  # of the palette: flat areas and edges of letters


def main() -> None:
    """Write the picture."""
    with Browser() as browser:
        browser.open(f"{PAGE.as_uri()}#theme=light")
        picture = Image.open(io.BytesIO(browser.picture())).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(PAGE.with_name("screenshot.png"), optimize=True)


if __name__ == "__main__":
    main()
