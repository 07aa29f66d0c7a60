"""YAML without what can make a small file huge: aliases, and values nested without end."""

from typing import Any

import yaml

DEEPEST = 50  # lists and mappings within each other


class PlainLoader(yaml.SafeLoader):
    """Reads plain values; raises yaml.YAMLError for an alias (*name) and for values nested too deeply."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose the node that comes next, as PyYAML does."""
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not read; write the value out", mark)
        if self._depth == DEEPEST:
            raise yaml.composer.ComposerError(None, None, "the values are nested too deeply", mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def read_plain(text: str) -> Any:
    """Read one document.

    Raises:
        yaml.YAMLError: as `PlainLoader` does.
    """
    return PlainLoader(text).get_single_data()
