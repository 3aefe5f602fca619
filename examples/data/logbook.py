"""Write `logbook.txt`, the text that `char_lm.py` learns: the log of a lighthouse that never was.

Every entry is put together from phrases by a fixed recipe and a fixed seed, so the file can be made again bit for bit:

    python examples/data/logbook.py
"""

import random
from pathlib import Path

SKY = [
    "clear", "grey", "low and heavy", "pale", "torn by the wind", "full of stars", "white with haze",
    "the colour of tin",
]  # fmt: skip
WIND = ["north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west"]
FORCE = ["hardly a breath", "a light air", "a steady breeze", "a stiff wind", "a gale", "a gale with rain in it"]
SEA = ["flat as a plate", "slow and oily", "short and choppy", "running high", "breaking over the rocks", "calm again"]
KIND = ["schooner", "brig", "trawler", "barge", "cutter", "collier", "packet boat", "lugger"]
NAME = [
    "Patience", "Morning Star", "Good Intent", "Two Sisters", "Alder", "Heron", "Margaret Ann", "Perseverance",
    "Kittiwake", "Fortune", "Silver Thread", "Old Promise",
]  # fmt: skip
CARGO = ["coal", "salt", "timber", "herring", "slate", "oats", "bricks", "wool", "empty casks", "nothing at all"]
BOUND = [
    "for the river", "for the islands", "down the coast", "for the northern ports", "home", "we could not tell where",
]  # fmt: skip
KEEPER = ["the old keeper", "my brother", "the boy", "the new man", "the cook", "I"]
WORK = [
    "trimmed the wick", "cleaned the glass from top to bottom", "painted the rail", "carried oil up the stair",
    "mended the gutter", "wound the clock of the lamp", "counted the stores", "wrote to the harbour office",
    "set new rope on the boat", "scraped salt off the panes", "oiled the hinges of the iron door",
]  # fmt: skip
REMARK = [
    "The lamp burned well all night.",
    "The lamp smoked until midnight, then burned well.",
    "We rang the bell until the fog lifted.",
    "A seal lay on the landing and would not be moved.",
    "Geese went over, very high, all through the watch.",
    "The boy asked how far the light can be seen, and I told him: as far as somebody is looking for it.",
    "Nothing passed, and nobody complained of it.",
    "A bottle came ashore with no letter in it.",
    "The glass fell all day and we knew what it meant.",
    "The glass rose, and so did we, before the sun.",
    "There was bread from the mainland, only a day old.",
    "The well tastes of the sea again.",
    "I dreamed that the light had gone out, went up to see, and it had not.",
    "My brother says that a quiet night is the best work we do.",
    "The cat has caught something and is proud of it.",
    "We could hear the buoy from the kitchen.",
]
MONTH = {
    "January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31, "August": 31,
    "September": 30, "October": 31, "November": 30, "December": 31,
}  # fmt: skip


def entry(draw: random.Random, month: str, day: int) -> str:
    """One day: the weather, perhaps ships, perhaps work, a remark."""
    lines = [f"{month} {day}. Sky {draw.choice(SKY)}. Wind {draw.choice(WIND)}, {draw.choice(FORCE)}."]
    lines.append(f"The sea {draw.choice(SEA)}.")
    for _ in range(draw.choice([0, 0, 1, 1, 2])):
        hour = f"{draw.randint(1, 12)} in the {draw.choice(['morning', 'afternoon', 'evening'])}"
        ship = f"{draw.choice(KIND)} {draw.choice(NAME)}, with {draw.choice(CARGO)}, bound {draw.choice(BOUND)}"
        lines.append(f"At {hour} the {ship}.")
    if draw.random() < 0.6:
        who, (first, then) = draw.choice(KEEPER), draw.sample(WORK, 2)
        lines.append(f"{who[0].upper()}{who[1:]} {first} and {then}.")
    lines.append(draw.choice(REMARK))
    return " ".join(lines) + "\n"


def logbook() -> str:
    """One year, day by day."""
    draw = random.Random(1871)
    days = [entry(draw, month, day) for month, days in MONTH.items() for day in range(1, days + 1)]
    return "".join(days)


if __name__ == "__main__":
    path = Path(__file__).with_name("logbook.txt")
    path.write_text(logbook())
    print(f"{path.name}: {path.stat().st_size} bytes")
