"""The page that maps other tools' names to ours names options that exist, and documents that are there."""

import re
from pathlib import Path

from zagora_jax.config import TrainConfig
from zagora_jax.options import options_of

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "coming_from.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]


def test_every_option_exists() -> None:
    named = [name for row in ROWS for name in re.findall(r"`([\w.]+)`", row[0])]
    assert len(named) > 30
    assert set(named) <= set(options_of(TrainConfig))


def test_every_link_leads_to_a_page() -> None:
    links = re.findall(r"\]\((\w+\.md)\)", PAGE)
    assert links
    assert all((DOCS / link).exists() for link in links)
