"""The picture of one step on three ranks, docs/step.svg, light or dark as the reader's browser is.

python scripts/draw_step.py            fails where the file is another
python scripts/draw_step.py --write    writes it
"""

import sys
from pathlib import Path

PATH = Path(__file__).parents[1] / "docs" / "step.svg"
WIDTH, HEIGHT, ROW, TOP = 940, 334, 84, 70
CUTS = (0, 0.30, 0.62, 1)  # what each rank owns of the weight
BAR, LEFT = 150, (88, 330, 560, 786)  # the length of a weight; where its four stages begin
SIZES = (30, 15, 15, 15)  # FP32 is drawn high, codes low
HEADS = (
    ("FP32 masters", "each rank has a slice"),
    ("own codes", "scale and cast"),
    ("all codes", "the same on every rank"),
    ("columnwise copy", "transposed"),
)
ARROWS = (("all-reduce", "amaxes, maximum"), ("all-gather", "codes"), ("local", ""))
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; text-anchor: middle }
.head { font-weight: 600 } .small { font-size: 11.5px }
.empty { fill: none; stroke: #8c959f } .arrow { stroke: #57606a; stroke-width: 1.5; fill: none }
.r0 { fill: #4477aa } .r1 { fill: #cc6677 } .r2 { fill: #ddaa33 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .empty { stroke: #6e7681 } .arrow { stroke: #9198a1 }
}
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return words around x."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a rectangle of a class of the style."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'


def slice_of(owner: int, x: float, y: float, height: float) -> str:
    """Return a rank's slice of the weight that begins at x."""
    begin, end = CUTS[owner] * BAR, CUTS[owner + 1] * BAR
    return rect(x + begin, y, end - begin, height, f"r{owner}")


def stage_of_rank(stage: int, rank: int) -> list[str]:
    """A stage's bar on one rank: the slices that it holds there, in a weight's outline."""
    x, height = LEFT[stage], SIZES[stage]
    y = TOP + 14 + rank * ROW + (30 - height) / 2
    owners = range(3) if stage > 1 else [rank]
    if stage < 3:
        return [
            *[slice_of(each, x, y, height) for each in owners],
            rect(x, y, BAR, height, "empty"),
        ]
    turned = f'<g transform="translate({x + 82} {y - 30}) rotate(90)">'
    bars = [slice_of(each, 0, 0, height) for each in owners]
    scaled = f'<g transform="scale(0.5 1)">{"".join(bars)}{rect(0, 0, BAR, height, "empty")}</g>'
    return [turned, scaled, "</g>"]


def picture() -> str:
    """Return the file's text."""
    shapes = []
    for stage, (head, below) in enumerate(HEADS):
        middle = LEFT[stage] + BAR / 2
        shapes += [text(middle, 24, head, "head"), text(middle, 42, below, "small")]
        for rank in range(3):
            shapes += stage_of_rank(stage, rank)
    shapes += [text(44, TOP + 34 + rank * ROW, f"rank {rank}") for rank in range(3)]
    for stage, (what, below) in enumerate(ARROWS):
        begin, end = LEFT[stage] + BAR + 8, LEFT[stage + 1] - 8
        middle = (begin + end) / 2
        for rank in range(3):
            y = TOP + 29 + rank * ROW
            shapes.append(f'<path class="arrow" d="M{begin} {y}H{end}m-6 -4l6 4l-6 4"/>')
        if stage < 2:  # between ranks
            shapes.append(rect(middle - 3, TOP + 6, 6, 2 * ROW + 46, "empty"))
        shapes += [
            text(middle, HEIGHT - 22, what, "head"),
            text(middle, HEIGHT - 6, below, "small"),
        ]
    title = "One step: masters in slices, one all-reduce, codes, one all-gather, a transpose"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n" + "\n".join(shapes) + "\n</svg>\n"
    )


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PATH.write_text(picture())
    elif PATH.read_text() != picture():
        sys.exit(f"{PATH} is not what this draws; run: python scripts/draw_step.py --write")
