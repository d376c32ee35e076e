"""Write files with made-up clicks, one a second: python make_clicks.py FOLDER FILES."""

import json
import random
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

folder, files = Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
dice, begin = random.Random(7), datetime(2026, 1, 1, tzinfo=UTC)
for number in range(files):
    rows = []
    for _ in range(50):
        at = begin + timedelta(seconds=20 * number + dice.random() * 20)
        page = f"/{dice.choice(['news', 'shop', 'help'])}/{dice.randrange(5)}"
        rows.append({"at": at.isoformat(), "user": f"u{dice.randrange(40)}", "page": page})
    part = folder / f".{number:05}.json"
    part.write_text("\n".join(map(json.dumps, rows)))
    part.replace(folder / f"{number:05}.json")  # Spark must not see half a file
    time.sleep(1)
