"""``python -m kvfit``; also what torchrun starts."""

from kvfit.cli.main import main

if __name__ == "__main__":
    main()
