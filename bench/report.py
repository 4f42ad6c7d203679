"""docs/benchmarks.md from the committed results: its figures and the tables between its markers; README's, precision.md's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import advice, tables
from .results import COMMANDS, Results

Rows = Sequence[dict[str, Any]]
PAGE, PRECISION, README = "benchmarks.md", "precision.md", "README.md"
BEGIN, END = "<!-- report: {} -->", "<!-- report: end -->"


@dataclass(frozen=True)
class Part:
    """A part of the page: a figure, a table, or both.

    Attributes:
        file, key: where its rows are.
        needs: what a row has where this part can be made, besides what every results file has.
        pick, of: which rows it is made of, and what to call them.
        figure: name of the function in ``figures``, and of the PNG; "" where there is none.
        table: Markdown of the rows.
    """

    file: str
    key: str = "rows"
    needs: tuple[str, ...] = ()
    pick: Callable[[Rows], Rows] = list
    of: str = ""
    figure: str = ""
    table: Callable[[Rows], str] | None = None

    def rows(self, found: Results) -> Rows:
        """The rows that this part can be made of."""
        rows = found.get(self.file, {}).get(self.key, [])
        return self.pick([row for row in rows if all(row.get(name) not in (None, {}) for name in self.needs)])

    def missing(self, found: Results) -> str:
        """What is not there for this part, and what would write it."""
        if self.file not in found:
            return f"there is no {self.file}.json; `{COMMANDS[self.file]}` writes it"
        about = (f"of {self.of}" if self.of else "", f"with {', '.join(self.needs)}" if self.needs else "")
        what = " ".join(filter(None, (self.key, *about)))
        return f"{self.file}.json has no {what}; `{COMMANDS[self.file]}` writes them"


FORMATS = "number formats beside fp32"
# Per section of the page, its parts.
SECTIONS: dict[str, tuple[Part, ...]] = {
    "decode": (
        Part("decode", needs=("peers",), pick=tables.exact, figure="speed_up"),
        Part("decode", pick=tables.exact, figure="share", table=tables.decode),
    ),
    "formats": (Part("decode", needs=("us_no_flush",), pick=tables.beside_formats, of=FORMATS, table=tables.formats),),
    "trace": (Part("decode", "trace", figure="trace", table=tables.trace),),
    "verify": (
        Part("verify", needs=("one_step_us",), figure="verify"),
        Part("verify", table=tables.verify),
    ),
    "materialize": (Part("materialize", figure="materialize", table=tables.materialize),),
    "drift": (
        Part("drift", "conventional", table=tables.conventional),
        Part("drift", needs=("model", "format", "position", "kl_mean"), figure="drift", table=tables.drift),
        Part("drift", needs=("kl_p99", "top1", "state_error"), table=tables.drift_end),
    ),
    "engines": (Part("sglang", figure="engines", table=tables.engines),),
}


def missing(found: Results) -> list[str]:
    """One line for each thing that is not there."""
    parts = [part for section in SECTIONS.values() for part in section]
    return list(dict.fromkeys(part.missing(found) for part in parts if not part.rows(found)))


def section(name: str, found: Results) -> str:
    """One section's Markdown."""
    parts = SECTIONS[name]
    made = [part for part in parts if part.rows(found)]
    absent = dict.fromkeys(f"*Not measured yet: {part.missing(found)}.*" for part in parts if part not in made)
    head = [tables.header(found[made[0].file]["header"], COMMANDS[made[0].file])] if made else []
    return "\n\n".join([*head, *(block for part in made for block in _blocks(part, part.rows(found))), *absent])


def _blocks(part: Part, rows: Rows) -> Iterator[str]:
    if part.figure:
        yield f"![{part.figure.replace('_', ' ')}](figures/{part.figure}.png)"
    if part.table:
        yield part.table(rows)


def bare() -> str:
    """A page of markers alone."""
    return "\n\n".join(f"## {name.capitalize()}\n\n{BEGIN.format(name)}\n{END}" for name in SECTIONS) + "\n"


def fill(page: str, found: Results) -> str:
    """The page with every section's text between its markers.

    Raises:
        ValueError: markers that name no section, are not closed, or are missing.
    """
    pattern = re.compile(BEGIN.format(r"(\w+)") + r"\n(.*?)" + re.escape(END), re.DOTALL)
    names = [name for name, _ in pattern.findall(page)]
    if sorted(names) != sorted(SECTIONS):
        raise ValueError(f"{PAGE}: expected a pair of markers for each of {', '.join(SECTIONS)}, got {names}")
    return pattern.sub(lambda at: f"{BEGIN.format(at[1])}\n\n{section(at[1], found)}\n\n{END}", page)


def summarise(readme: str, found: Results) -> str:
    """README.md with its table, where it has markers for one and decode steps were measured."""
    if "decode" not in found:
        return readme
    decode, verify = (found.get(name, {"rows": []}) for name in ("decode", "verify"))
    text = f"{tables.summary(decode['rows'], verify['rows'])}\n\n{tables.header(decode['header'], COMMANDS['decode'])}"
    return _between(readme, "summary", text)


def advise(precision: str, found: Results) -> str:
    """precision.md with its tables, where it has markers for them: of the readout helper, of scales, of formats to choose."""
    made = {
        "helper": tables.helper(advice.committed(advice.HELPER)),
        "scales": tables.scales(advice.committed(advice.SCALES)),
        "advice": advice.advice(found.get("decode", {"rows": []})["rows"]),
    }
    for name, text in made.items():
        precision = _between(precision, name, text)
    return precision


def _between(page: str, name: str, text: str) -> str:
    """The page with the text between the first markers of that name, where it has some."""
    begin = BEGIN.format(name)
    if begin not in page:
        return page
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text}\n\n{END}{rest.partition(END)[2]}"


def drawable(found: Results) -> dict[str, Rows]:
    """Per figure that can be drawn, its rows."""
    return {part.figure: rows for parts in SECTIONS.values() for part in parts if part.figure and (rows := part.rows(found))}
