"""Write the map of modules in docs/architecture.md from the first sentence of each module's docstring.

python docs/module_map.py            # write it
python docs/module_map.py --check    # fail if it is not up to date
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "zero_infinity"
PAGE = ROOT / "docs" / "architecture.md"
_REGION = re.compile(r"(<!-- modules: ([a-z_.]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str) -> str:
    """Return the page with every region replaced by the table of its package ("." is the top level)."""
    return _REGION.sub(lambda match: f"{match[1]}{_table(match[2])}\n{match[3]}", text)


def packages() -> set[str]:
    """Return the packages that have modules, as regions name them."""
    return {_package_of(path) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}


def _package_of(path: Path) -> str:
    folder = path.parent.relative_to(PACKAGE)
    return folder.parts[0] if folder.parts else "."


def _table(package: str) -> str:
    paths = sorted(
        path for path in PACKAGE.rglob("*.py") if _package_of(path) == package and path.name != "__init__.py"
    )
    rows = [f"| `{path.relative_to(PACKAGE)}` | {_purpose(path)} |" for path in paths]
    return "\n".join(["| file | purpose |", "|---|---|", *rows])


def _purpose(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0]
    return sentence.rstrip(".").replace("|", "\\|")


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    new = render(text)
    if "--check" in sys.argv and new != text:
        print("docs/architecture.md is not up to date: run python docs/module_map.py", file=sys.stderr)
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
