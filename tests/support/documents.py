"""The documents and their code blocks."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDERS = ("deploy", "protos", "sync_service", "trainer", "tests")
_BLOCK = re.compile(r"(?:<!-- run: ([\w.]+) -->\n)?```(\w+)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A code block; a test runs it by its `name`, which is None for a block that is only shown."""

    name: str | None
    language: str
    code: str


@dataclass(frozen=True)
class Document:
    """A document; `name` is its path inside the repository."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        return self.path.read_text()

    def blocks(self) -> list[Block]:
        return [Block(name or None, language, code) for name, language, code in _BLOCK.findall(self.text)]

    def block(self, name: str) -> str:
        """The code of the block with this name."""
        [code] = [block.code for block in self.blocks() if block.name == name]
        return code

    def named(self, language: str) -> dict[str, str]:
        """The code of all named blocks in a language, by name."""
        return {block.name: block.code for block in self.blocks() if block.name and block.language == language}


def document(name: str) -> Document:
    """The document at a path inside the repository."""
    return Document(ROOT / name)


README = document("README.md")
_PAGES = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*.md")]
DOCUMENTS = [README, *(Document(path) for path in sorted(_PAGES))]
EVERYTHING = "\n".join(each.text for each in DOCUMENTS)
