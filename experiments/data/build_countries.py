"""Builds the embedded sets countries_s1, countries_s2 and countries_s3 from a countries.json of mledoze/countries.

    python experiments/data/build_countries.py COUNTRIES_JSON [--out funcppo/kg/graph/embedded] [--seed 0]

The splits follow Bouchard, Singh & Trouillon 2015, "On approximate reasoning capabilities of low-rank vector spaces"
(AAAI Spring Symposium): countries fall at random into train, valid and test so that each valid or test country has a
neighbour in train (here one of its own region, so that its region can be derived). To be found: its region.

    S1  the region of each valid or test country is left out of train
    S2  and so is its subregion
    S3  and so is the region of each of its neighbours, which keep their subregion
"""

import json
import random
import sys
import unicodedata
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.paths import EMBEDDED_DATA, make_parser


class Country(NamedTuple):
    """Names as slugs."""

    region: str
    subregion: str
    neighbours: set[str]


Countries = dict[str, Country]  # by slug
Triple = tuple[str, str, str]

HELD_OUT = 24  # countries of valid, and as many of test
REGIONS = ("Africa", "Americas", "Asia", "Europe", "Oceania")
RULES = (
    "1.0\tlocatedIn(X,Y) :- locatedIn(X,Z), locatedIn(Z,Y)\n",
    "1.0\tlocatedIn(X,Y) :- neighborOf(X,Z), locatedIn(Z,Y)\n",
    "1.0\tlocatedIn(X,Y) :- neighborOf(X,Z), locatedIn(Z,W), locatedIn(W,Y)\n",
)


def slug(name: str) -> str:
    """A name in small ASCII letters: `Åland Islands` is aland_islands."""
    plain = (
        unicodedata.normalize("NFKD", name)
        .encode("ascii", "ignore")
        .decode()
        .lower()
    )
    return "_".join(
        "".join(c if c.isalnum() or c == "-" else " " for c in plain).split()
    )


def read_countries(path: Path) -> Countries:
    """Every country of the five regions; a border counts when both sides list it."""
    rows = [
        row
        for row in json.loads(path.read_text(encoding="utf-8"))
        if row["region"] in REGIONS
    ]
    places = {slug(row[key]) for row in rows for key in ("region", "subregion")}

    # A country has its official name where the common one is also that of a region: Micronesia.
    names = {}
    for row in rows:
        common, official = (
            slug(row["name"]["common"]),
            slug(row["name"]["official"]),
        )
        names[row["cca3"]] = official if common in places else common

    borders = {row["cca3"]: set(row["borders"]) for row in rows}
    countries = {}
    for row in rows:
        code = row["cca3"]
        neighbours = {
            names[other]
            for other in borders[code]
            if code in borders.get(other, ())
        }
        countries[names[code]] = Country(
            slug(row["region"]), slug(row["subregion"]), neighbours
        )
    if len(countries) != len(rows) or places & set(countries):
        raise ValueError(
            f"{path}: expected distinct names of countries, regions and subregions"
        )
    return countries


def split(countries: Countries, seed: int) -> tuple[list[str], list[str]]:
    """Valid and test countries, each with a train neighbour of its own region."""
    order = sorted(countries)
    random.Random(seed).shuffle(order)
    held_out: list[str] = []
    for country in order:
        candidates = {*held_out, country}
        if all(
            has_train_neighbour(countries, name, candidates)
            for name in candidates
        ):
            held_out.append(country)
        if len(held_out) == 2 * HELD_OUT:
            return sorted(held_out[:HELD_OUT]), sorted(held_out[HELD_OUT:])
    raise ValueError(
        f"expected {2 * HELD_OUT} countries with a neighbour in train, got {len(held_out)}"
    )


def has_train_neighbour(
    countries: Countries, name: str, held_out: set[str]
) -> bool:
    """Whether a country has a neighbour of its own region that is not held out."""
    country = countries[name]
    return any(
        countries[other].region == country.region
        for other in country.neighbours - held_out
    )


def train_sets(countries: Countries, held_out: list[str]) -> list[list[Triple]]:
    """The train triples of S1, S2 and S3, sorted."""
    region = {
        (name, "locatedIn", country.region)
        for name, country in countries.items()
    }
    subregion = {
        (name, "locatedIn", country.subregion)
        for name, country in countries.items()
    }
    inside = {
        (country.subregion, "locatedIn", country.region)
        for country in countries.values()
    }
    border = {
        (name, "neighborOf", other)
        for name, country in countries.items()
        for other in country.neighbours
    }
    neighbours = {
        other for name in held_out for other in countries[name].neighbours
    }
    s1 = (
        border
        | inside
        | subregion
        | {triple for triple in region if triple[0] not in held_out}
    )
    s2 = s1 - {triple for triple in subregion if triple[0] in held_out}
    s3 = s2 - {triple for triple in region if triple[0] in neighbours}
    return [sorted(triples) for triples in (s1, s2, s3)]


def main() -> None:
    """Write the folders of S1, S2 and S3."""
    parser = make_parser(__doc__)
    parser.add_argument("countries_json", type=Path)
    parser.add_argument("--out", type=Path, default=EMBEDDED_DATA)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    countries = read_countries(args.countries_json)
    valid, test = split(countries, args.seed)
    queries = {
        name: [
            (country, "locatedIn", countries[country].region)
            for country in held_out
        ]
        for name, held_out in (("valid", valid), ("test", test))
    }
    for number, train in enumerate(train_sets(countries, valid + test), 1):
        folder = args.out / f"countries_s{number}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, triples in {"train": train, **queries}.items():
            text = "".join("\t".join(triple) + "\n" for triple in triples)
            (folder / f"{name}.txt").write_text(
                text, encoding="utf-8", newline="\n"
            )
        (folder / "rules.txt").write_text(
            "".join(RULES[:number]), encoding="utf-8", newline="\n"
        )


if __name__ == "__main__":
    main()
