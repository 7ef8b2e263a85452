"""Log lines as plain text, or as one JSON object each."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any, Literal

from typing_extensions import override

LogFormat = Literal["json", "text"]
_FIELDS = "fields"


class JsonFormatter(logging.Formatter):
    """Formats each record as a JSON object, which includes the fields of :func:`log_fields`."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Formats each record as text: the message, then the fields as ``name=value``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    @override
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, _FIELDS, {})
        words = [
            f"{name}={json.dumps(value, default=str)}" for name, value in fields.items() if value not in (None, "")
        ]
        return " ".join([super().format(record), *words])


def log_fields(logger: logging.Logger, level: int, message: str, fields: dict[str, Any]) -> None:
    """Log a message with fields."""
    logger.log(level, message, extra={_FIELDS: fields})


def configure(style: LogFormat, level: int = logging.INFO) -> None:
    """Send all log lines of this process to stderr in this style."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "urllib3", "transformers", "torch", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
