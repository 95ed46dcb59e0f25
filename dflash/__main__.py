"""`python -m dflash` and the `dflash` script."""

import os

from dflash.cli import cli


def main() -> None:
    """Run the command line.

    CUDA's allocator reads how it works once, when torch is loaded, so it is said here. Segments that grow
    suit batches of ever other sizes: blocks of a fixed size leave gaps. What the user has set holds.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    cli(prog_name="dflash")


if __name__ == "__main__":
    main()
