"""`python -m dflash` and the `dflash` script."""

from dflash.cli import cli


def main() -> None:
    """Run the command line."""
    cli(prog_name="dflash")


if __name__ == "__main__":
    main()
