# SPDX-License-Identifier: Apache-2.0
"""Record a version of vLLM: ``python -m kimi_k3.contract.write PACKAGE [FILE]``.

``PACKAGE`` is the ``vllm`` directory of an installation or of an unpacked wheel. Read every difference to
the version before it (``git diff --no-index``) before a new file is committed: recording says that the
plugin was written against this version.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kimi_k3.contract import source
from kimi_k3.contract.compare import look_at
from kimi_k3.contract.facts import RELIANCES
from kimi_k3.contract.record import Contract, Definition, is_release, release
from kimi_k3.errors import OperatorError


def written(package: Path) -> Contract:
    """The contract of vLLM in ``package``.

    Raises:
        OperatorError: it is no release of vLLM, or something that the plugin relies on is not there.
    """
    version = source.text_constant(package / "_version.py", "__version__")
    if version is None or not is_release(version):
        raise OperatorError(
            f"{package}: its version is {version!r}, which is no release",
            remedy="give the vllm directory of an installation or of an unpacked wheel",
        )
    files: dict[str, dict[str, Definition]] = {}
    for fact in RELIANCES:
        tree = source.parse(package / fact.file)
        definition = look_at(package, tree, fact)
        lack = source.lacking(tree, fact)
        if definition is None or lack is not None:
            raise OperatorError(
                f"{package}: {lack}: {fact.why}",
                remedy="change the plugin, then kimi_k3/contract/facts.py",
            )
        files.setdefault(fact.file, {})[fact.name] = definition
    numbers = release(version)
    assert numbers is not None
    return Contract(version=".".join(map(str, numbers)), files=dict(sorted(files.items())))


def text(contract: Contract) -> str:
    """As it stands in a file."""
    return contract.model_dump_json(indent=2, exclude_none=True) + "\n"


def main(arguments: list[str]) -> int:
    """Write to a file, or to standard output."""
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        found = text(written(Path(arguments[0])))
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if len(arguments) == 2:
        Path(arguments[1]).write_text(found, encoding="utf-8")
    else:
        sys.stdout.write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
