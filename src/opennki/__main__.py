"""`python -m opennki`."""

from opennki.cli import main

if __name__ == "__main__":
    main()
