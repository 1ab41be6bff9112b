"""Model configs on disk."""

import json
from pathlib import Path


def config_file(path: Path, config: dict) -> Path:
    """Writes a config.json under any name; returns it."""
    path.write_text(json.dumps(config))
    return path
