"""A made-up world with four regions, its splits and train triples checked by the definition."""

from __future__ import annotations

import json

import pytest

from experiments.data import build_countries
from funcppo.kg.graph.loaders import load

N_COUNTRIES = 120


@pytest.fixture
def world(tmp_path):
    """Countries on a ring of each region; one border is listed by one side alone."""
    rows = []
    for i in range(N_COUNTRIES):
        region = build_countries.REGIONS[i % 4]
        rows.append(
            {
                "cca3": f"C{i}",
                "name": {
                    "common": f"Land {i}",
                    "official": f"Republic of Land {i}",
                },
                "region": region,
                "subregion": f"{region} {'north' if i % 8 < 4 else 'south'}",
                "borders": [f"C{(i + step) % N_COUNTRIES}" for step in (4, -4)],
            }
        )
    rows[0]["borders"].append("C1")
    rows.append(
        rows[1]
        | {
            "cca3": "ANT",
            "region": "Antarctic",
            "name": {"common": "Ice", "official": "Ice"},
        }
    )
    file = tmp_path / "countries.json"
    file.write_text(json.dumps(rows))
    return file


def test_a_slug_is_small_ascii():
    assert build_countries.slug("Åland Islands") == "aland_islands"
    assert build_countries.slug("Guinea-Bissau (West)") == "guinea-bissau_west"


def test_a_border_counts_when_both_sides_list_it(world):
    countries = build_countries.read_countries(world)
    assert len(countries) == N_COUNTRIES
    assert countries["land_0"].neighbours == {
        "land_4",
        f"land_{N_COUNTRIES - 4}",
    }


def test_each_set_leaves_out_what_it_says(world, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.argv",
        ["build_countries.py", str(world), "--out", str(tmp_path / "out")],
    )
    build_countries.main()
    countries = build_countries.read_countries(world)
    valid, test = build_countries.split(countries, 0)
    held_out = {*valid, *test}
    assert len(held_out) == 2 * build_countries.HELD_OUT
    for number in (1, 2, 3):
        folder = tmp_path / "out" / f"countries_s{number}"
        train = {
            tuple(line.split("\t"))
            for line in (folder / "train.txt").read_text().splitlines()
        }
        located = {
            (head, tail)
            for head, relation, tail in train
            if relation == "locatedIn"
        }
        for name, country in countries.items():
            beside = any(other in held_out for other in country.neighbours)
            has_region = name not in held_out and not (number == 3 and beside)
            assert ((name, country.region) in located) == has_region, (
                number,
                name,
            )
            assert ((name, country.subregion) in located) == (
                number == 1 or name not in held_out
            )
            assert name not in held_out or country.neighbours - held_out
        queries = [
            line.split("\t")
            for line in (folder / "test.txt").read_text().splitlines()
        ]
        assert queries == [
            [name, "locatedIn", countries[name].region] for name in test
        ]
        assert len((folder / "rules.txt").read_text().splitlines()) == number
        assert len(load(folder).rules) == number


def test_too_few_countries_are_an_error(world):
    countries = build_countries.read_countries(world)
    few = {name: countries[name] for name in sorted(countries)[:30]}
    few = {
        name: row._replace(neighbours=row.neighbours & few.keys())
        for name, row in few.items()
    }
    with pytest.raises(
        ValueError, match="expected 48 countries with a neighbour in train, got"
    ):
        build_countries.split(few, 0)
