"""Builds the embedded sets countries_s1, countries_s2 and countries_s3 from a countries.json of mledoze/countries.

    python experiments/build_countries.py COUNTRIES_JSON [--out funcppo/data/embedded] [--seed 0]

The splits follow Bouchard, Singh & Trouillon 2015, "On approximate reasoning capabilities of low-rank vector spaces"
(AAAI Spring Symposium): countries fall at random into train, valid and test so that each valid or test country has a
neighbour in train (here one of its own region, so that its region can be derived). To be found: its region.

    S1  the region of each valid or test country is left out of train
    S2  and so is its subregion
    S3  and so is the region of each of its neighbours, which keep their subregion
"""

from __future__ import annotations

import argparse
import json
import random
import unicodedata
from pathlib import Path

Countries = dict[str, tuple[str, str, set[str]]]  # slug -> (region, subregion, neighbours)

HELD_OUT = 24  # countries of valid, and as many of test
REGIONS = ("Africa", "Americas", "Asia", "Europe", "Oceania")
RULES = (
    "1.0\tlocatedIn(X,Y) :- locatedIn(X,Z), locatedIn(Z,Y)\n",
    "1.0\tlocatedIn(X,Y) :- neighborOf(X,Z), locatedIn(Z,Y)\n",
    "1.0\tlocatedIn(X,Y) :- neighborOf(X,Z), locatedIn(Z,W), locatedIn(W,Y)\n",
)


def slug(name: str) -> str:
    """A name in small ASCII letters: `Åland Islands` is aland_islands."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return "_".join("".join(c if c.isalnum() or c == "-" else " " for c in plain).split())


def read_countries(path: Path) -> Countries:
    """Every country of the five regions; a border counts when both sides list it."""
    rows = [row for row in json.loads(path.read_text(encoding="utf-8")) if row["region"] in REGIONS]
    places = {slug(row[key]) for row in rows for key in ("region", "subregion")}
    official = {row["cca3"]: slug(row["name"]["official"]) for row in rows}
    common = {row["cca3"]: slug(row["name"]["common"]) for row in rows}
    names = {code: official[code] if name in places else name for code, name in common.items()}  # Micronesia is both
    borders = {row["cca3"]: set(row["borders"]) for row in rows}
    mutual = {a: {names[b] for b in borders[a] if a in borders.get(b, ())} for a in borders}
    found = {names[r["cca3"]]: (slug(r["region"]), slug(r["subregion"]), mutual[r["cca3"]]) for r in rows}
    if len(found) != len(rows) or places & set(found):
        raise ValueError(f"{path}: want distinct names of countries, regions and subregions")
    return found


def split(countries: Countries, seed: int) -> tuple[list[str], list[str]]:
    """Valid and test countries, each with a train neighbour of its own region."""
    order = sorted(countries)
    random.Random(seed).shuffle(order)
    chosen: list[str] = []
    for country in order:
        tried = {*chosen, country}
        if all(any(countries[n][0] == countries[c][0] for n in countries[c][2] - tried) for c in tried):
            chosen.append(country)
        if len(chosen) == 2 * HELD_OUT:
            return sorted(chosen[:HELD_OUT]), sorted(chosen[HELD_OUT:])
    raise ValueError(f"want {2 * HELD_OUT} countries with a neighbour in train, got {len(chosen)}")


def train_sets(countries: Countries, held_out: list[str]) -> list[list[tuple[str, str, str]]]:
    """The train triples of S1, S2 and S3, sorted."""
    region = {(c, "locatedIn", r) for c, (r, _, _) in countries.items()}
    subregion = {(c, "locatedIn", s) for c, (_, s, _) in countries.items()}
    inside = {(s, "locatedIn", r) for r, s, _ in countries.values()}
    border = {(c, "neighborOf", n) for c, (_, _, neighbours) in countries.items() for n in neighbours}
    neighbours = {n for c in held_out for n in countries[c][2]}
    s1 = border | inside | subregion | {t for t in region if t[0] not in held_out}
    s2 = s1 - {t for t in subregion if t[0] in held_out}
    s3 = s2 - {t for t in region if t[0] in neighbours}
    return [sorted(s) for s in (s1, s2, s3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("countries_json", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "funcppo" / "data" / "embedded")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    countries = read_countries(args.countries_json)
    valid, test = split(countries, args.seed)
    for number, train in enumerate(train_sets(countries, valid + test), 1):
        folder = args.out / f"countries_s{number}"
        folder.mkdir(parents=True, exist_ok=True)
        queries = {"valid": valid, "test": test}
        files = {name: [(c, "locatedIn", countries[c][0]) for c in held] for name, held in queries.items()}
        for name, triples in {"train": train, **files}.items():
            text = "".join("\t".join(t) + "\n" for t in triples)
            (folder / f"{name}.txt").write_text(text, encoding="utf-8", newline="\n")
        (folder / "rules.txt").write_text("".join(RULES[:number]), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
