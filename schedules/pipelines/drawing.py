"""Boxes and texts, written as SVG or as PNG. Neither needs a library of pictures."""

from __future__ import annotations

import html
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vescale_fn.schedules.pipelines import messages

# Three by five pixels: an octal digit for each row, top to bottom.
_GLYPHS = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717", "6": "74757", "7": "71122",
    "8": "75757", "9": "75717", "a": "25755", "b": "65656", "c": "34443", "d": "65556", "e": "74647", "f": "74644",
    "g": "34553", "h": "55755", "i": "72227", "j": "11152", "k": "55655", "l": "44447", "m": "57755", "n": "65555",
    "o": "25552", "p": "65644", "q": "25573", "r": "65655", "s": "34216", "t": "72222", "u": "55557", "v": "55552",
    "w": "55775", "x": "55255", "y": "55222", "z": "71247", "%": "51245", ".": "00002", ",": "00024", ":": "02020",
    "-": "00700", "_": "00007", "=": "07070", "/": "11244", "(": "12221", ")": "42224", "*": "05250", " ": "00000",
}  # fmt: skip
_PIXEL = 2  # size of a glyph's pixel in a PNG
GLYPH = 4 * _PIXEL  # advance from letter to letter

INK = "#222222"


@dataclass(frozen=True)
class Box:
    """A filled rectangle, in pixels from the top left, with a text inside and one that appears under the pointer."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    label: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Text:
    """A line of text whose left end is at x and whose middle is at y."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Drawing:
    """Boxes, then texts, on white ground of `width` by `height` pixels."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    texts: tuple[Text, ...]

    def save(self, path: str | Path) -> None:
        """Write SVG or PNG, by the end of the path; raises ValueError for another end."""
        suffix = Path(path).suffix.lower()
        if suffix == ".svg":
            Path(path).write_text(self.svg())
        elif suffix == ".png":
            Path(path).write_bytes(self.png())
        else:
            raise ValueError(messages.unknown_picture(str(path)))

    def svg(self) -> str:
        """The drawing as SVG, with tips under the pointer."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="sans-serif" font-size="11" fill="{INK}">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
        ]
        for b in self.boxes:
            tip = f"<title>{html.escape(b.tip)}</title>" if b.tip else ""
            shape = f'x="{b.x:.2f}" y="{b.y:.2f}" width="{b.width:.2f}" height="{b.height:.2f}"'
            lines.append(f'<rect {shape} fill="{b.colour}" stroke="#ffffff" stroke-width="0.5">{tip}</rect>')
            if b.label:
                at = f'x="{b.x + b.width / 2:.2f}" y="{b.y + b.height / 2:.2f}"'
                lines.append(f'<text {at} {_CENTRED} pointer-events="none">{html.escape(b.label)}</text>')
        for t in self.texts:
            lines.append(f'<text x="{t.x:.2f}" y="{t.y:.2f}" dy="0.35em">{html.escape(t.text)}</text>')
        return "\n".join([*lines, "</svg>", ""])

    def pixels(self) -> npt.NDArray[np.uint8]:
        """The drawing as an array [height, width, 3] of red, green and blue."""
        image = np.full((self.height, self.width, 3), 255, np.uint8)
        for b in self.boxes:
            left, right, top, bottom = round(b.x), round(b.x + b.width), round(b.y), round(b.y + b.height)
            image[top : max(top + 1, bottom - 1), left : max(left + 1, right - 1)] = _rgb(b.colour)
            if b.label:
                _write(image, round(b.x + (b.width - GLYPH * len(b.label)) / 2) + 1, b.y + b.height / 2, b.label)
        for t in self.texts:
            _write(image, round(t.x), t.y, t.text)
        return image

    def png(self) -> bytes:
        """The drawing as PNG: 8 bits a colour, unfiltered rows, one compressed chunk (W3C, "PNG Specification")."""
        image = self.pixels()
        rows = np.concatenate([np.zeros((self.height, 1), np.uint8), image.reshape(self.height, -1)], axis=1)
        head = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


_CENTRED = 'dy="0.35em" text-anchor="middle"'


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def _write(image: npt.NDArray[np.uint8], x: int, y: float, text: str) -> None:
    """Write over the image; what reaches beyond it is cut off."""
    top = round(y - 2.5 * _PIXEL)
    for i, letter in enumerate(text.lower()):
        for row, column in _dots(letter):
            down, right = top + row * _PIXEL, x + i * GLYPH + column * _PIXEL
            image[max(down, 0) : down + _PIXEL, max(right, 0) : right + _PIXEL] = _rgb(INK)


def _dots(letter: str) -> Iterator[tuple[int, int]]:
    for row, digit in enumerate(_GLYPHS.get(letter, "77777")):
        for column in range(3):
            if int(digit) >> (2 - column) & 1:
                yield row, column
